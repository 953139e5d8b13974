"""What one sequence needs of the KV cache, from admission to release.

The life of a page: taken for tokens that the step being scheduled computes -> filled by that step -> published (listed in
the prefix cache) at a later schedule(), once all its tokens are known -> out of its group's look-back, or its sequence
gone: dropped -> cached until evicted, or free. The device runs steps in the order they were scheduled, so a
page may be taken again at once: whoever fills it next does so after every step that still read it. Two rules follow, and
callers keep them: `num_computed` counts only tokens of steps already dispatched while these methods run, and what a step
fills is published no earlier than the next schedule().
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxinfer.kv.pages import DUMP_PAGE, PageGroup, PagePool
from jaxinfer.kv.prefix import BlockHasher, PrefixCache, root_digest

TableUpdate = tuple[int, int, int, int]  # (slot, group, table index, page)


@dataclass(slots=True, kw_only=True, eq=False)
class PagedTokens:
    """The part of a sequence that the KV manager reads and keeps.

    Attributes:
      tokens: known token ids; only ever appended to.
      salt: tenants with different salts share no pages.
      extra: whatever else the KV depends on (adapter, media).
      read_cache: take cached pages at admission (not so for prompt_logprobs, which needs every position computed).
      slot: row of the engine's batch arrays that mirrors the tables; -1 while it holds no pages.
      num_computed: tokens whose KV dispatched steps have written or will write; cached ones included.
      tables: one list of pages a group; entry i holds positions [i * page_size, (i + 1) * page_size), 0 once given back.
      digests: of the first blocks, as far as needed so far; they outlive a preemption.
      num_published: blocks already offered to the prefix cache.
    """

    tokens: list[int]
    salt: bytes = b""
    extra: bytes = b""
    read_cache: bool = True
    slot: int = -1
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0


class KVManager:
    """Page tables of all sequences over one pool. All methods are all-or-nothing, and none touches a device."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        groups: tuple[PageGroup, ...] = (PageGroup(),),
        *,
        prefix_caching: bool = True,
    ):
        self.page_size = page_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.cache = PrefixCache(len(groups))
        self.pool = PagePool(num_pages, self.cache)
        self._hasher = BlockHasher(page_size)

    def pages_alone(self, num_tokens: int, max_chunk: int) -> int:
        """Most pages that one sequence holds at once while `num_tokens` are computed, at most `max_chunk` a step."""
        return pages_for_one(num_tokens, max_chunk, self.page_size, self.groups)

    def match(self, seq: PagedTokens) -> int:
        """Tokens of the longest page-aligned prefix whose KV is cached wherever its next query looks; below len(tokens)."""
        if not self.prefix_caching or not seq.read_cache:
            return 0
        blocks = (len(seq.tokens) - 1) // self.page_size  # at least one is computed: its logits are needed
        self._hash(seq, blocks)
        windowed = []
        for group, pages in zip(self.groups, self.cache.pages, strict=True):
            if group.kind == "full":
                blocks = next((i for i in range(blocks) if seq.digests[i] not in pages), blocks)
            else:
                windowed.append((group, pages))
        settled = False
        while not settled:
            settled = True
            for group, pages in windowed:
                first = group.first_visible(blocks * self.page_size) // self.page_size
                seen = range(blocks - 1, first - 1, -1)
                gap = next((i for i in seen if seq.digests[i] not in pages), None)
                if gap is not None:  # a shorter prefix that reaches past it would look back on it as well
                    blocks, settled = gap, False
        return blocks * self.page_size

    def admit(
        self, seq: PagedTokens, cached: int, end: int, updates: list[TableUpdate], *, reserve: int = 0
    ) -> bool:
        """Gives `seq` its cached prefix and pages for positions [cached, end), if `reserve` pages are left then.

        `cached` is what match(seq) returned, with no other call between. Needs seq.slot. Sets num_computed.
        """
        blocks = cached // self.page_size
        tables = []
        for group, pages in zip(self.groups, self.cache.pages, strict=True):
            first = group.first_visible(cached) // self.page_size
            tables.append([DUMP_PAGE] * first + [pages[digest] for digest in seq.digests[first:blocks]])
        hits = [page for table in tables for page in table if page]
        idle = sum(self.pool.refs[page] == 0 for page in hits)
        fresh = (-(-end // self.page_size) - blocks) * len(tables)
        if idle + fresh + reserve > self.pool.available:
            return False
        for page in hits:
            self.pool.share(page)
        seq.tables = tables
        seq.num_computed = cached
        seq.num_published = blocks
        for group, table in enumerate(tables):
            updates.extend((seq.slot, group, index, page) for index, page in enumerate(table))
        return self.extend(seq, end, updates)

    def extend(self, seq: PagedTokens, end: int, updates: list[TableUpdate]) -> bool:
        """Publishes what is filled, gives back what no query from num_computed on sees, and adds pages up to `end`.

        False if the pool has too few; then nothing was added.
        """
        self.publish(seq)
        size, slot, tables = self.page_size, seq.slot, seq.tables
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            index = group.first_visible(seq.num_computed) // size - 1
            while index >= 0 and table[index]:
                self.pool.drop(table[index])
                table[index] = DUMP_PAGE
                updates.append((slot, g, index, DUMP_PAGE))
                index -= 1
        held = len(tables[0])
        wanted = -(-end // size)
        if (wanted - held) * len(tables) > self.pool.available:
            return False
        for g, table in enumerate(tables):
            for index in range(held, wanted):
                page = self.pool.take()
                table.append(page)
                updates.append((slot, g, index, page))
        return True

    def publish(self, seq: PagedTokens) -> None:
        """Lists the pages of `seq` that dispatched steps have filled with known tokens, so that others may share them."""
        full = min(seq.num_computed, len(seq.tokens)) // self.page_size
        if not self.prefix_caching or full <= seq.num_published:
            return
        self._hash(seq, full)
        for index in range(seq.num_published, full):
            for group, table in enumerate(seq.tables):
                if table[index]:
                    self.cache.publish(group, seq.digests[index], table[index])
        seq.num_published = full

    def release(self, seq: PagedTokens) -> None:
        """Takes every page of `seq` back, at any moment; filled ones stay cached, its latest block evicted first."""
        self.publish(seq)
        for block in zip(*map(reversed, seq.tables), strict=True):
            for page in block:
                if page:
                    self.pool.drop(page)
        seq.tables = []
        seq.num_computed = 0
        seq.num_published = 0

    def check_integrity(self, sequences: Iterable[PagedTokens]) -> None:
        """Raises RuntimeError unless pool, prefix cache and the tables of all live `sequences` agree."""
        self.cache.check_integrity()
        holders = [0] * len(self.pool.refs)
        for seq in sequences:
            held = [page for table in seq.tables for page in table if page]
            if len(set(held)) != len(held):
                raise RuntimeError(f"sequence in slot {seq.slot}: a page is twice in its tables {seq.tables}")
            if any(len(table) * self.page_size < seq.num_computed for table in seq.tables):
                raise RuntimeError(
                    f"sequence in slot {seq.slot}: {seq.num_computed} tokens, but tables {seq.tables}"
                )
            for group, table in enumerate(seq.tables):
                for index, page in enumerate(table):
                    if page:
                        holders[page] += 1
                        key = self.cache.keys.get(page)
                        if key is None and self.pool.refs[page] > 1:
                            raise RuntimeError(f"page {page} is shared, but not through the prefix cache")
                        if key is not None and (group, [key[1]]) != (key[0], seq.digests[index : index + 1]):
                            raise RuntimeError(
                                f"page {page} holds another block than entry {index} of group {group}"
                            )
        self.pool.check_integrity(holders)

    def _hash(self, seq: PagedTokens, count: int) -> None:
        if len(seq.digests) < count:
            self._hasher.extend(seq.digests, seq.tokens, count, root_digest(seq.salt, seq.extra))


def pages_for_one(num_tokens: int, max_chunk: int, page_size: int, groups: tuple[PageGroup, ...]) -> int:
    """Most pages that one sequence holds at once while `num_tokens` are computed, at most `max_chunk` a step."""
    whole = -(-num_tokens // page_size)
    pages = 0
    for group in groups:
        seen = group.span - 1 + max_chunk  # positions a step touches; it may begin anywhere in a page
        pages += whole if group.kind == "full" else min(whole, (seen + page_size - 2) // page_size + 1)
    return pages

"""Prefix cache: which page holds the KV of which tokens, so that equal prefixes are computed once.

A block is one page worth of tokens. Its digest chains over everything before it (PagedAttention's hashing, as in
vLLM's automatic prefix caching, with SHA-256 so that no user can craft a collision), so a digest names a block *and*
its whole past. The same block has one page in every page group, since each group holds other layers.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict


def root_digest(salt: bytes, extra: bytes) -> bytes:
    """Parent of a sequence's first block. Sequences that differ in salt (tenant) or extra (adapter, media) share nothing."""
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + extra).digest()


class BlockHasher:
    """Digests of a sequence's blocks, each computed once."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._pack = struct.Struct(f"<{page_size}i").pack

    def extend(self, digests: list[bytes], tokens: list[int], count: int, root: bytes) -> None:
        """Appends to `digests` until it names the first `count` blocks of `tokens`, all of which must be complete."""
        parent = digests[-1] if digests else root
        for start in range(len(digests) * self._page_size, count * self._page_size, self._page_size):
            block = self._pack(*tokens[start : start + self._page_size])
            parent = hashlib.sha256(parent + block).digest()
            digests.append(parent)


class PrefixCache:
    """Map from (group, digest) to page, and the order in which pages that nobody uses are given up.

    A page listed here is `idle` (no sequence holds it: evictable, least recently used first) or held by sequences.
    """

    def __init__(self, num_groups: int):
        self.pages: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.keys: dict[int, tuple[int, bytes]] = {}  # page -> (group, digest): the inverse of `pages`
        self.idle: OrderedDict[int, None] = OrderedDict()

    def publish(self, group: int, digest: bytes, page: int) -> None:
        """Lists a filled page; when another page already holds the same block, that one stays the listed one."""
        if self.pages[group].setdefault(digest, page) == page:
            self.keys[page] = (group, digest)

    def evict(self) -> int:
        """Forgets the least recently used idle page and returns it."""
        page, _ = self.idle.popitem(last=False)
        group, digest = self.keys.pop(page)
        del self.pages[group][digest]
        return page

    def check_integrity(self) -> None:
        """Raises RuntimeError if the map and its inverse disagree, or an idle page is not listed."""
        listed = {page: (g, digest) for g, pages in enumerate(self.pages) for digest, page in pages.items()}
        if listed != self.keys or len(listed) != sum(map(len, self.pages)):
            raise RuntimeError("prefix cache: the map from digests to pages and its inverse disagree")
        if not self.idle.keys() <= listed.keys():
            raise RuntimeError(
                f"prefix cache: idle pages {sorted(self.idle.keys() - listed.keys())} have no digest"
            )

"""The pool of KV pages, and how far back each group of layers looks.

Every page has the same size and may serve any group, so one pool serves them all. A page is in exactly one state:

    free      nobody holds it and nothing of worth is in it
    cached    nobody holds it, but the prefix cache lists its content: taken when no page is free
    in use    one sequence holds it, or several through the prefix cache (reference count)

Page 0 is none of these: padding rows write to it, and it is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jaxinfer.errors import ConfigError
from jaxinfer.kv.prefix import PrefixCache

DUMP_PAGE = 0


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that look back equally far, and so keep the same pages.

    Attributes:
      kind: "full": a query sees every position before it; "sliding": the last `span`, itself included;
        "chunked": those of its own chunk of `span` positions (Llama 4).
      span: positions; 0 for "full".
    """

    kind: Literal["full", "sliding", "chunked"] = "full"
    span: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "full") != (self.span == 0) or self.span < 0:
            raise ConfigError(
                f"a {self.kind} page group cannot have span {self.span}: 0 for full, else at least 1"
            )

    def first_visible(self, position: int) -> int:
        """First position that the query at `position` sees; it never falls as `position` grows."""
        if self.kind == "full":
            return 0
        if self.kind == "sliding":
            return max(0, position - self.span + 1)
        return position - position % self.span


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer keeps its KV.

    Attributes:
      group: index of the page group whose tables it uses.
      array: index of the cache's array that its pages are in.
      look: how far back its queries see.
    """

    group: int
    array: int
    look: PageGroup


def place_layers(
    looks: Sequence[PageGroup], bounds: Sequence[int] | None = None
) -> tuple[tuple[PageGroup, ...], tuple[LayerPlace, ...]]:
    """The page groups of a model and the place of each layer, from how far back each layer looks.

    All groups share one pool, so a page has the same bytes in each: a group holds at most as many layers as the cache has
    arrays, and layers of one kind fill as many groups as they need. There are as many arrays as layers that look back
    over everything: their pages alone grow with the context, so none of theirs is left unused.

    Args:
      bounds: the first layer of each pipeline stage, then the number of layers; None: one stage has them all. Stages share
        the page tables, and so the groups, while each has arrays of its own.
    """
    bounds = (0, len(looks)) if bounds is None else bounds
    stages: list[dict[PageGroup, list[int]]] = []
    for start, end in pairwise(bounds):
        stages.append({look: [] for look in looks})
        for layer in range(start, end):
            stages[-1][looks[layer]].append(layer)
    arrays = [len(kinds.get(PageGroup(), ())) or max(map(len, kinds.values())) for kinds in stages]
    needed = {
        look: max(-(-len(kinds[look]) // most) for kinds, most in zip(stages, arrays, strict=True))
        for look in stages[0]
    }
    # Where another stage needs more groups of a kind, a stage without full layers needs fewer arrays.
    arrays = [max(-(-len(kinds[look]) // needed[look]) for look in kinds) for kinds in stages]
    groups: list[PageGroup] = []
    places: dict[int, LayerPlace] = {}
    for look, count in needed.items():
        for kinds, most in zip(stages, arrays, strict=True):
            for i, layer in enumerate(kinds[look]):
                places[layer] = LayerPlace(len(groups) + i // most, i % most, look)
        groups += [look] * count
    return tuple(groups), tuple(places[layer] for layer in range(len(looks)))


class PagePool:
    """Hands out pages and takes them back; counts who holds them."""

    def __init__(self, num_pages: int, cache: PrefixCache):
        """num_pages includes the dump page; what `cache` lists is kept, once nobody holds it, while pages are free."""
        if num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2 (page 0 is the dump page), got {num_pages}")
        self.total = num_pages - 1
        self.refs = [0] * num_pages
        self._cache = cache
        self._free = list(range(self.total, 0, -1))

    @property
    def available(self) -> int:
        """Pages that take() can hand out: free and cached."""
        return len(self._free) + len(self._cache.idle)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page of the caller's own, holding garbage. Needs available > 0."""
        page = self._free.pop() if self._free else self._cache.evict()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that the prefix cache lists."""
        if self.refs[page] == 0:
            del self._cache.idle[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder fewer. Of several pages dropped together the first is the first to be evicted."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self._cache.keys:
                self._cache.idle[page] = None
            else:
                self._free.append(page)

    def check_integrity(self, holders: list[int]) -> None:
        """Raises RuntimeError unless free + cached + in use = total and the reference counts are `holders` (by page)."""
        if holders != self.refs:
            wrong = {p: (n, m) for p, (n, m) in enumerate(zip(self.refs, holders, strict=True)) if n != m}
            raise RuntimeError(f"page pool: page -> (reference count, actual holders) disagree: {wrong}")
        used = [page for page, count in enumerate(self.refs) if count]
        every = sorted([*self._free, *self._cache.idle, *used])
        if every != list(range(1, self.total + 1)):
            raise RuntimeError(
                f"page pool: {len(self._free)} free + {len(self._cache.idle)} cached + {len(used)} in use "
                f"are not the {self.total} pages of the pool, each once"
            )
        if listed := [page for page in self._free if page in self._cache.keys]:
            raise RuntimeError(f"page pool: free pages {listed} are listed in the prefix cache")

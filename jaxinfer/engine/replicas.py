"""Data parallelism: copies of a model side by side, each with requests and a cache of its own, behind the face of one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import EngineLoad, RequestOutput, SamplingParams
from jaxinfer.errors import OverloadError, RequestError
from jaxinfer.media.item import MediaItem

_REMEMBERED = 4096  # beginnings of prompts
_AHEAD = 2  # sequences more than the least busy copy has, that the one with a prompt's beginning may have and still get it


class ReplicatedEngine:
    """Engines of one model on devices of their own. Each request goes to one of them: the one that has seen its beginning, if it is
    not much busier than others, else the least busy.

    Attributes:
      config, grammars: of each engine.
      engines: the copies.
    """

    def __init__(self, engines: Sequence[Engine]):
        self.engines = tuple(engines)
        self.config = engines[0].config
        self.grammars = engines[0].grammars
        for engine in engines:
            engine.grammars = self.grammars  # what is compiled for one is for all
        self._homes: dict[str, Engine] = {}  # by request
        self._seen: OrderedDict[tuple[Any, ...], Engine] = (
            OrderedDict()
        )  # who last got a prompt that begins so

    @property
    def num_steps(self) -> int:
        return sum(engine.num_steps for engine in self.engines)

    @property
    def num_pages(self) -> int:
        """Of all copies together."""
        return sum(engine.num_pages for engine in self.engines)

    def load(self) -> EngineLoad:
        """Of all copies together; kv_usage is their mean."""
        loads = [engine.load() for engine in self.engines]
        return EngineLoad(
            waiting=sum(load.waiting for load in loads),
            running=sum(load.running for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / len(loads),
            generated_tokens=sum(load.generated_tokens for load in loads),
            prefilled_tokens=sum(load.prefilled_tokens for load in loads),
            preemptions=sum(load.preemptions for load in loads),
        )

    def has_unfinished_requests(self) -> bool:
        return any(engine.has_unfinished_requests() for engine in self.engines)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
    ) -> None:
        """As Engine.add_request."""
        if request_id in self._homes:
            raise RequestError(
                f"request id {request_id!r} is in use by an unfinished request", param="request_id"
            )
        items = tuple(media)
        beginning = (
            cache_salt,
            tuple(prompt_token_ids[: self.config.page_size]),
            *(item.digest for item in items),
        )
        full: OverloadError | None = None
        for engine in self._preferred(beginning):
            try:
                engine.add_request(
                    request_id,
                    prompt_token_ids,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    media=items,
                )
            except OverloadError as error:
                full = error
                continue
            self._homes[request_id] = engine
            self._seen[beginning] = engine
            self._seen.move_to_end(beginning)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return
        assert full is not None
        raise full

    def abort_request(self, request_id: str) -> None:
        engine = self._homes.pop(request_id, None)
        if engine is not None:
            engine.abort_request(request_id)

    def step(self) -> list[RequestOutput]:
        """A step of each copy that has something to do: their devices compute at the same time."""
        changed = [output for engine in self.engines for output in engine.step()]
        for output in changed:
            if output.finished:
                self._homes.pop(output.request_id, None)
        return changed

    def _preferred(self, beginning: tuple[Any, ...]) -> list[Engine]:
        """All copies, the best one first."""
        busy = {id(engine): (load := engine.load()).waiting + load.running for engine in self.engines}
        order = sorted(self.engines, key=lambda engine: busy[id(engine)])
        known = self._seen.get(beginning)
        if known is not None and busy[id(known)] <= busy[id(order[0])] + _AHEAD:
            order.remove(known)
            order.insert(0, known)
        return order

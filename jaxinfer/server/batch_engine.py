"""The server's model and engine as the batch runner asks for them: called on the batches' thread, served on the event loop."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from jaxinfer.engine.request import RequestOutput, SamplingParams
from jaxinfer.engine.service import EngineFailure, RequestStream
from jaxinfer.errors import OverloadError, RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.server.context import ServerContext
from jaxinfer.server.errors import HTTPFailure
from jaxinfer.server.generate import prepare_allowed
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

_BEHIND = 1 << 20  # added to the priority of every line: online requests go first
_MAX_PRIORITY = 2**63 - 1
_STEP_S = 0.1  # longest wait for a request to end before the runner may look up
_ROOM_S = 0.02  # between looks for room in the engine


class Stopped(Exception):
    """Raised out of `run_batch` when it should stop while it waits for room in the engine."""


class ServedBatchModel:
    """Runs lines as requests of their own: the same checks, settings and limits, behind those that come over HTTP.

    Args:
      loop: where the service runs.
      should_stop: as in `run_batch`.
    """

    def __init__(
        self, context: ServerContext, loop: asyncio.AbstractEventLoop, should_stop: Callable[[], bool]
    ):
        model = context.model
        self._context = context
        self._loop = loop
        self.engine = _ServiceEngine(context, loop, should_stop)
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.chat_template: ChatTemplate | None = model.chat_template
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.image_processor = model.image_processor
        self.model_name = model.name
        self.generation_defaults = model.defaults

    def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Raises RequestError where the HTTP route would refuse the request for what it is."""
        try:
            return _on_loop(prepare_allowed(self._context, request), self._loop)
        except HTTPFailure as error:
            raise RequestError(str(error), param=error.error["param"], code=error.error["code"]) from None


class _ServiceEngine:
    def __init__(
        self, context: ServerContext, loop: asyncio.AbstractEventLoop, should_stop: Callable[[], bool]
    ):
        self._service = context.service
        self._config = context.config
        self._loop = loop
        self._should_stop = should_stop
        self._done: queue.SimpleQueue[RequestStream] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}

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
        """Waits for room. RequestError as the engine's; Stopped, EngineFailure."""

        async def submit() -> RequestStream:
            stream = await self._service.submit(
                f"{request_id}-{id(self)}",
                prompt_token_ids,
                params,
                priority=min(max(priority, 0) + _BEHIND, _MAX_PRIORITY),
                cache_salt=cache_salt,
                media=media,
            )
            stream.done.add_done_callback(lambda _: self._done.put(stream))
            return stream

        while not self._should_stop():
            if self._has_room(len(prompt_token_ids)):
                try:
                    self._streams[request_id] = _on_loop(submit(), self._loop)
                except OverloadError:  # online requests have filled the engine
                    pass
                else:
                    return
            time.sleep(_ROOM_S)
        raise Stopped

    def step(self) -> list[RequestOutput]:
        """Waits a moment for requests to end; those that have."""
        try:
            streams = [self._done.get(timeout=_STEP_S)]
        except queue.Empty:
            return []
        while not self._done.empty():
            streams.append(self._done.get())
        ended = []
        for stream in streams:
            request_id = stream.request_id.removesuffix(f"-{id(self)}")
            if self._streams.pop(request_id, None) is None:
                continue
            if stream.done.cancelled() or stream.done.exception() is not None:
                raise EngineFailure(f"the engine gave up: {stream.done.exception()}")
            assert stream.output is not None
            stream.output.request_id = request_id
            ended.append(stream.output)
        return ended

    def abort_request(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._loop.call_soon_threadsafe(self._service.abort, stream)

    def _has_room(self, prompt_tokens: int) -> bool:
        """Lines take half of what may be queued, so that they alone never keep an online request out."""
        service, config = self._service, self._config
        tokens = service.queued_prefill_tokens
        return service.num_queued < (config.max_queued_requests + 1) // 2 and (
            not tokens or tokens + prompt_tokens <= config.max_queued_prefill_tokens // 2
        )


def _on_loop[T](work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result()

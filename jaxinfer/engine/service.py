"""One engine for many coroutines: a thread owns and steps it, and hands what is new to the event loop once a step.

The loop's side never touches the engine. It sends commands (add, abort), which the thread carries out between two steps; the
thread sends everything that a step produced in one call, so that the cost of crossing over does not grow with the requests.
No JAX in here: anything with the methods of `EngineLike` will do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxinfer.engine.request import EngineLoad, RequestOutput, SamplingParams, TokenLogprob
from jaxinfer.media.item import MediaItem

logger = logging.getLogger(__name__)


@runtime_checkable
class EngineLike(Protocol):
    """What a service needs of an engine: jaxinfer.engine.engine.Engine's own methods."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
    ) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def load(self) -> EngineLoad: ...


class EngineFailure(Exception):
    """The engine stopped, or gave up a request; the message is for logs, and says nothing about other requests."""


@dataclass(slots=True)
class Increment:
    """What one completion gained since the last one. finish_reason is None until the completion has ended."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    stop_reason: str | int | None


Sink = Callable[["RequestStream", list[Increment]], None]


class RequestStream:
    """A request in the engine, as the event loop sees it.

    Attributes:
      output: the engine's own account. It changes while the request runs: read it when `done` is.
      done: resolves when the request has ended; fails with EngineFailure when the engine gave it up.
      submitted, first_token, latest, finished: times as time.perf_counter counts, seconds; latest is that of the newest token.
        None (latest: submitted) before they happened.
    """

    __slots__ = (
        "_sent",
        "done",
        "finished",
        "first_token",
        "latest",
        "output",
        "prompt_tokens",
        "request_id",
        "sink",
        "submitted",
    )

    def __init__(self, request_id: str, prompt_tokens: int, n: int, sink: Sink | None):
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output: RequestOutput | None = None
        self.sink = sink
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submitted = self.latest = time.perf_counter()
        self.first_token: float | None = None
        self.finished: float | None = None
        self._sent = [
            [0, 0, False] for _ in range(n)
        ]  # characters, tokens, finish reason; the engine thread's

    def gained(self, output: RequestOutput) -> list[Increment]:
        """What is new in each completion. Called on the engine's thread."""
        increments = []
        for completion, sent in zip(output.outputs, self._sent, strict=True):
            chars, tokens, ended = sent
            if ended or (len(completion.token_ids) == tokens and completion.finish_reason is None):
                continue
            logprobs = completion.logprobs
            increments.append(
                Increment(
                    completion.index,
                    completion.text[chars:],
                    completion.token_ids[tokens:],
                    None if logprobs is None else logprobs[tokens:],
                    completion.finish_reason,
                    completion.stop_reason,
                )
            )
            sent[:] = len(completion.text), len(completion.token_ids), completion.finish_reason is not None
        return increments


class EngineService:
    """Runs an engine in a thread of its own. Every method but the constructor is for the event loop's thread.

    Attributes:
      healthy: False once the engine has failed; nothing is accepted then.
      on_tokens: called on the loop with each request that has gained tokens, and when; `first_token` and `latest` are still those
        of before. Requests without a sink: their first tokens and their last.
      on_finish: called on the loop with each request that has left the engine, however it did.
    """

    def __init__(self, engine: EngineLike):
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._streams: dict[str, RequestStream] = {}  # the engine thread's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load = EngineLoad()
        self._unanswered = 0
        self._unanswered_tokens = 0
        self._active: dict[str, RequestStream] = {}  # the loop's
        self.healthy = True
        self.on_tokens: Callable[[RequestStream, float], None] | None = None
        self.on_finish: Callable[[RequestStream], None] | None = None

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    @property
    def num_active(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._active)

    @property
    def num_queued(self) -> int:
        """Requests that have no token yet."""
        return self._unanswered

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens of requests that have no token yet."""
        return self._unanswered_tokens

    def start(self) -> None:
        """Starts the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step; requests still in the engine fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._fail_all("the server is shutting down")

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
        sink: Sink | None = None,
    ) -> RequestStream:
        """Queues a request and returns once the engine has taken it.

        Args:
          sink: called on the loop with what each step adds; it must not block. None: only the end is told.
        Raises:
          RequestError, OverloadError: as Engine.add_request does.
          EngineFailure: the engine has stopped.
        """
        if not self.healthy or self._stopping:
            raise EngineFailure("the engine has stopped")
        loop = asyncio.get_running_loop()
        stream = RequestStream(request_id, len(prompt_token_ids), params.n, sink)
        taken: asyncio.Future[None] = loop.create_future()

        def add() -> None:
            try:
                self._engine.add_request(
                    request_id,
                    prompt_token_ids,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    media=media,
                )
            except Exception as error:
                loop.call_soon_threadsafe(_reject, taken, error)
            else:
                self._streams[request_id] = stream
                loop.call_soon_threadsafe(_resolve, taken)

        self._send(add)
        self._active[request_id] = stream
        self._count(stream, 1)
        try:
            await taken
        except BaseException:  # refused, or given up while it waited, perhaps at the moment it was taken
            self._send(lambda: self._drop(request_id))
            self._end(stream)
            raise
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Takes a request out of the engine; its pages are free before the next step. Safe at any time."""
        if stream.request_id in self._active:
            self._end(stream)
            self._send(lambda: self._drop(stream.request_id))
        if not stream.done.done():
            stream.done.set_exception(EngineFailure("the request was aborted"))
            stream.done.exception()  # nobody need ask

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # The engine's thread

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self._engine.has_unfinished_requests()):
                        self._load = self._engine.load()
                        self._wake.wait()
                    if self._stopping:
                        return
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                if self._engine.has_unfinished_requests():
                    outputs = self._engine.step()
                    self._load = self._engine.load()
                    if outputs:
                        self._publish(outputs)
        except Exception as error:
            logger.exception("the engine failed")
            self.healthy = False
            self._call(self._fail_all, f"the engine failed: {error}")

    def _publish(self, outputs: list[RequestOutput]) -> None:
        news: list[tuple[RequestStream, list[Increment], RequestOutput | None]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            ended = output.finished
            if ended:
                del self._streams[output.request_id]
            if stream.sink is not None:
                news.append((stream, stream.gained(output), output if ended else None))
            elif ended or stream.first_token is None:
                news.append((stream, [], output if ended else None))
            stream.output = output
        self._call(self._deliver, news, time.perf_counter())

    def _drop(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._engine.abort_request(request_id)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            self._stopping = True

    # The event loop

    def _deliver(
        self, news: list[tuple[RequestStream, list[Increment], RequestOutput | None]], when: float
    ) -> None:
        for stream, increments, ended in news:
            if stream.request_id not in self._active:  # aborted meanwhile
                continue
            if self.on_tokens is not None:
                self.on_tokens(stream, when)
            if stream.first_token is None:
                stream.first_token = when
                self._count(stream, -1)
            stream.latest = when
            if ended is not None:
                stream.finished = when
                self._end(stream)
            if stream.sink is not None and increments:
                try:
                    stream.sink(stream, increments)
                except Exception as error:
                    logger.exception("a stream's sink failed")
                    self.abort(stream)
                    if not stream.done.done():
                        stream.done.set_exception(EngineFailure(str(error)))
                    continue
            if ended is not None and not stream.done.done():
                stream.done.set_result(None)

    def _end(self, stream: RequestStream) -> None:
        if self._active.pop(stream.request_id, None) is None:
            return
        if stream.first_token is None:
            self._count(stream, -1)
        if self.on_finish is not None:
            self.on_finish(stream)

    def _count(self, stream: RequestStream, sign: int) -> None:
        self._unanswered += sign
        self._unanswered_tokens += sign * stream.prompt_tokens

    def _fail_all(self, message: str) -> None:
        for stream in list(self._active.values()):
            self._end(stream)
            if not stream.done.done():
                stream.done.set_exception(EngineFailure(message))
                stream.done.exception()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reject(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

"""An engine that says what a test tells it to, one token a request and step, and a server around it on a real socket.

Texts go through the real detokenizer and the real stop rules; only the model is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from typing import Any

from byte_tokenizer import END, EOS, VOCAB_SIZE, byte_tokenizer

from jaxinfer.config.server import ServerConfig
from jaxinfer.engine.completion import Completion, RequestState
from jaxinfer.engine.request import (
    CompletionOutput,
    EngineLoad,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    check_request,
)
from jaxinfer.engine.service import EngineService
from jaxinfer.errors import OverloadError
from jaxinfer.server.context import ServedModel, ServerContext
from jaxinfer.server.lifecycle import running
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.detokenizer import IncrementalDetokenizer

TOKENIZER = byte_tokenizer()
MAX_MODEL_LEN = 4096
NAN = -1

Script = Callable[[list[int], SamplingParams, int], list[int]]


def says(text: str) -> Script:
    """Everyone is told the same."""
    return lambda prompt, params, index: [*text.encode(), EOS]


def echo(prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """The prompt again, without its control tokens."""
    return [*(t for t in prompt if t < 256), EOS]


class ScriptedEngine:
    """Attributes:
    script: what to answer to (prompt, params, index of the completion); NAN stands for logits without a choice.
    gate: steps wait while it is clear.
    aborted: request ids, in order.
    """

    def __init__(self, script: Script = echo, *, step_seconds: float = 0.0, max_running: int = 256):
        self.script = script
        self.step_seconds = step_seconds
        self.max_running = max_running
        self.max_waiting = 10_000
        self.gate = threading.Event()
        self.gate.set()
        self.aborted: MutableSequence[str] = []
        self.seen: MutableSequence[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.requests: dict[str, tuple[RequestState, list[Completion], list[list[int]]]] = {}
        self.num_steps = 0
        self.num_tokens = 0
        self.fail_at: int | None = None  # step at which the engine dies

    def add_request(
        self, request_id, prompt_token_ids, params, *, priority=0, cache_salt=None, media=()
    ) -> None:
        ids = check_request(prompt_token_ids, priority, cache_salt)
        if len(self.requests) >= self.max_running + self.max_waiting:
            raise OverloadError("too many requests are waiting")
        assert request_id not in self.requests
        self.seen.append((ids, params, {"priority": priority, "cache_salt": cache_salt}))
        outputs = [
            CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)
        ]
        scores = [None, *(TokenLogprob(t, -1.0, [(t, -1.0)]) for t in ids[1:])]
        output = RequestOutput(
            request_id, ids, outputs, prompt_logprobs=scores if params.prompt_logprobs is not None else None
        )
        state = RequestState(output, params, unfinished=params.n)
        completions = [
            Completion(
                state,
                out,
                params,
                IncrementalDetokenizer(
                    TOKENIZER,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=tuple(params.stop),
                    include_stop=params.include_stop_str_in_output,
                    prompt_ids=ids,
                    min_tokens=params.min_tokens,
                ),
                frozenset() if params.ignore_eos else frozenset((EOS, END)),
                params.max_tokens or MAX_MODEL_LEN - len(ids),
                0,
            )
            for out in outputs
        ]
        scripts = [list(self.script(ids, params, i)) for i in range(params.n)]
        self.requests[request_id] = (state, completions, scripts)

    def abort_request(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def load(self) -> EngineLoad:
        active = min(len(self.requests), self.max_running)
        return EngineLoad(len(self.requests) - active, active, active / self.max_running, self.num_tokens)

    def step(self) -> list[RequestOutput]:
        self.gate.wait(10)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("secret detail: device on fire")
        stepped = list(self.requests.items())[: self.max_running]
        for request_id, (state, completions, scripts) in stepped:
            state.output.started = state.output.started or time.perf_counter()
            for completion, script in zip(completions, scripts, strict=True):
                if completion.output.finish_reason is not None:
                    continue
                token = script.pop(0) if script else ord(".")
                self.num_tokens += token >= 0
                logprob = TokenLogprob(token, -0.5, [(token, -0.5), (46, -2.0)])
                if completion.append(token, None if state.params.logprobs is None else logprob):
                    state.unfinished -= 1
            if not state.unfinished:
                state.output.finished = True
                del self.requests[request_id]
        return [state.output for _, (state, _, _) in stepped]


@dataclass
class Server:
    """A running server. `call` runs a function on its event loop."""

    url: str
    context: ServerContext
    engine: Any
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], object]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def wait_busy(self, seconds: float = 5.0) -> bool:
        """Whether a request gets into the engine within the time."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if self.engine.has_unfinished_requests():
                return True
            time.sleep(0.002)
        return False

    def wait_idle(self, seconds: float = 2.0) -> bool:
        """Whether every request leaves the engine within the time."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if not self.engine.has_unfinished_requests() and not self.context.service.num_active:
                return True
            time.sleep(0.005)
        return False


@contextlib.contextmanager
def serving(engine: Any, model: ServedModel | None = None, **settings: Any) -> Iterator[Server]:
    """A server on a free port of the loopback interface, on an event loop in a thread of its own."""
    if model is None:
        model = ServedModel(
            name="scripted",
            tokenizer=TOKENIZER,
            chat_template=ChatTemplate.from_tokenizer(TOKENIZER),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            defaults={},
        )
    config = ServerConfig(**{"port": 0, "drain_timeout_s": 5.0, "log_requests": False, **settings})
    ready: list[Any] = []
    started = threading.Event()

    async def run() -> None:
        context = ServerContext(model, EngineService(engine), config)
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with running(context) as url:
            ready.append(Server(url, context, engine, loop, lambda: loop.call_soon_threadsafe(end.set)))
            started.set()
            await end.wait()

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            ready.append(error)
            started.set()

    worker = threading.Thread(target=thread, daemon=True)
    worker.start()
    assert started.wait(20)
    if isinstance(ready[0], BaseException):
        raise ready[0]
    server = ready[0]
    try:
        yield server
    finally:
        engine_gate = getattr(engine, "gate", None)
        if engine_gate is not None:
            engine_gate.set()
        server.stop()
        worker.join(20)
        assert not worker.is_alive()
        if len(ready) > 1:
            raise ready[1]

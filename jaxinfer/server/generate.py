"""/v1/chat/completions and /v1/completions, and what every generating route shares: admission, running, streaming."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from aiohttp import web

from jaxinfer.engine.request import RequestOutput
from jaxinfer.engine.service import Increment, RequestStream
from jaxinfer.errors import RequestError
from jaxinfer.protocol.errors import SERVER_ERROR, error_object
from jaxinfer.protocol.parse import parse_chat_request, parse_completion_request
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.protocol.response import chat_completion, failure_of, text_completion
from jaxinfer.protocol.stream import ChunkStream
from jaxinfer.server.admission import check_alive, check_room
from jaxinfer.server.body import read_json
from jaxinfer.server.call import call_of
from jaxinfer.server.context import CONTEXT, ServedModel, ServerContext
from jaxinfer.server.errors import HTTPFailure
from jaxinfer.server.errors import failure_of as http_failure_of
from jaxinfer.server.sse import EventStream

_numbers = itertools.count()  # ids in the engine are our own: a client may send one id twice


@runtime_checkable
class Answer(Protocol):
    """The shape that one API gives to what the engine says."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]: ...
    def stream(self) -> AnswerStream: ...


@runtime_checkable
class AnswerStream(Protocol):
    """The same as events: jaxinfer.protocol.stream.ChunkStream's methods."""

    def opening(self) -> bytes: ...
    def advance(self, prompt: int, increment: Increment, output: RequestOutput) -> bytes: ...
    def closing(self, outputs: list[RequestOutput]) -> bytes: ...
    def failure(self, error: dict[str, Any]) -> bytes: ...


class Completions:
    """OpenAI's chat completion or text completion."""

    def __init__(self, prepared: PreparedRequest, model: ServedModel, response_id: str):
        self._prepared = prepared
        self._tokenizer = model.tokenizer
        self._shown: dict[str, Any] = {
            "response_id": response_id,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        if self._prepared.request.chat is None:
            return text_completion(self._prepared, outputs, self._tokenizer, **self._shown)
        assert self._tokenizer is not None  # prepare has refused it
        return chat_completion(self._prepared, outputs[0], self._tokenizer, **self._shown)

    def stream(self) -> AnswerStream:
        return ChunkStream(self._prepared, self._tokenizer, **self._shown)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _completions(request, parse_chat_request, "chatcmpl-")


async def completions(request: web.Request) -> web.StreamResponse:
    return await _completions(request, parse_completion_request, "cmpl-")


async def _completions(
    request: web.Request, parse: Callable[..., GenerationRequest], prefix: str
) -> web.StreamResponse:
    context = request.app[CONTEXT]
    check_alive(context)
    parsed = parse(await read_json(request), context.model.defaults)
    prepared = await admit(context, parsed)
    answer = Completions(prepared, context.model, prefix + call_of(request).id)
    return await respond(request, prepared, answer)


async def admit(context: ServerContext, parsed: GenerationRequest) -> PreparedRequest:
    """Checks a request against the model and the load, and prepares it for the engine."""
    check_room(context, 0)
    prepared = await prepare_allowed(context, parsed)
    check_room(context, sum(len(p.token_ids) for p in prepared.prompts))
    return prepared


async def prepare_allowed(context: ServerContext, parsed: GenerationRequest) -> PreparedRequest:
    """Prepares a request that the server's limits allow, whatever its load; batch lines pass through here too."""
    check_model(context, parsed.model)
    prepared = await context.prepare(parsed)
    count = len(prepared.prompts) * prepared.params.n
    if count > context.config.max_n:
        raise RequestError(
            f"{len(prepared.prompts)} prompts with n={prepared.params.n} are {count} completions, the most allowed is "
            f"{context.config.max_n}",
            param="n",
        )
    return prepared


async def respond(request: web.Request, prepared: PreparedRequest, answer: Answer) -> web.StreamResponse:
    """Runs a prepared request and answers it, whole or streamed as it asks."""
    job = _Job(request, request.app[CONTEXT], prepared, answer)
    try:
        return await (job.stream() if prepared.request.stream else job.whole())
    finally:
        job.end()


def check_model(context: ServerContext, asked: str | None) -> None:
    """Raises HTTPFailure 404 for a model that is not served here."""
    if asked is not None and asked != context.model.name:
        raise HTTPFailure(
            404,
            f"the model {asked[:200]!r} is not served here; {context.model.name!r} is",
            param="model",
            code="model_not_found",
        )


class _Job:
    """One HTTP request: an engine request for each of its prompts."""

    def __init__(
        self, request: web.Request, context: ServerContext, prepared: PreparedRequest, answer: Answer
    ):
        self._request = request
        self._context = context
        self._prepared = prepared
        self._answer = answer
        self._deadline = asyncio.get_running_loop().time() + context.config.request_timeout_s
        self._streams: list[RequestStream] = []

    async def whole(self) -> web.Response:
        async with asyncio.timeout_at(self._deadline):
            await self._submit(None)
            await asyncio.gather(*(stream.done for stream in self._streams))
        outputs = self._outputs()
        for output in outputs:
            failure = failure_of(output)
            if failure is not None:
                raise HTTPFailure(500, failure, code="generation_failed")
        return web.json_response(self._answer.whole(outputs))

    async def stream(self) -> web.StreamResponse:
        config = self._context.config
        chunks = self._answer.stream()
        opening = chunks.opening()  # before anything can come from the engine
        events = EventStream(
            self._request,
            keep_alive_s=config.keep_alive_s,
            max_unread_bytes=config.max_unread_bytes,
            on_drop=self._on_drop,
        )
        places: dict[str, int] = {}
        failures: list[str] = []

        def sink(stream: RequestStream, increments: list[Increment]) -> None:
            output = stream.output
            assert output is not None
            place = places[stream.request_id]
            parts = []
            for increment in increments:
                if increment.finish_reason in ("error", "abort"):
                    failures.append(output.error or "the engine ended the request before it was answered")
                else:
                    parts.append(chunks.advance(place, increment, output))
            events.write(b"".join(parts))

        try:
            async with asyncio.timeout_at(self._deadline):
                await self._submit(sink, places)
            response = await events.open(call_of(self._request).headers, opening)
            try:
                async with asyncio.timeout_at(self._deadline):
                    await asyncio.gather(*(stream.done for stream in self._streams))
                failure = error_object(failures[0], kind=SERVER_ERROR) if failures else None
            except Exception as error:  # the head is out: what is left is an event
                failure = http_failure_of(error).error
            if failure is None:
                events.write(chunks.closing(self._outputs()))
            else:
                call_of(self._request).note["error"] = failure["message"]
                events.write(chunks.failure(failure))
            await events.close()
            return response
        finally:
            events.cancel()

    def end(self) -> None:
        """Takes what still runs out of the engine, and notes what the request was for the log."""
        call = call_of(self._request)
        call.streams = self._streams
        note = call.note
        note["model"] = self._context.model.name
        note["prompt_tokens"] = sum(len(p.token_ids) for p in self._prepared.prompts)
        outputs = [stream.output for stream in self._streams if stream.output is not None]
        completions = [c for output in outputs for c in output.outputs]
        note["completion_tokens"] = sum(len(c.token_ids) for c in completions)
        note["cached_tokens"] = sum(output.cached_tokens for output in outputs)
        note["finish_reasons"] = [c.finish_reason or "abort" for c in completions]
        queued = [
            s.output.started - s.submitted
            for s in self._streams
            if s.output is not None and s.output.started is not None
        ]
        if queued:
            note["queue_ms"] = round(max(0.0, *queued) * 1e3, 2)
        firsts = [s.first_token - s.submitted for s in self._streams if s.first_token is not None]
        if firsts:
            note["ttft_ms"] = round(min(firsts) * 1e3, 2)
        for stream in self._streams:
            self._context.service.abort(stream)

    async def _submit(self, sink: Any, places: dict[str, int] | None = None) -> None:
        """All prompts at once, so that the engine takes them between the same two steps."""
        request = self._prepared.request
        tasks: list[asyncio.Task[RequestStream]] = []
        for place, prompt in enumerate(self._prepared.prompts):
            request_id = f"{call_of(self._request).id}-{next(_numbers)}"
            if places is not None:
                places[request_id] = place
            submission = self._context.service.submit(
                request_id,
                prompt.token_ids,
                self._prepared.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                media=prompt.media,
                sink=sink,
            )
            tasks.append(asyncio.create_task(submission))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # whoever is told to stop just now must still know what to take out of the engine
            self._streams += [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
        for task in tasks:
            task.result()

    def _outputs(self) -> list[RequestOutput]:
        outputs = []
        for stream in self._streams:
            assert stream.output is not None
            outputs.append(stream.output)
        return outputs

    def _on_drop(self) -> None:
        call_of(self._request).note["error"] = "the client read too slowly and was dropped"
        for stream in self._streams:
            self._context.service.abort(stream)

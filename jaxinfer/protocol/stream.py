"""Streamed answers: what the engine adds to a request, as server-sent events in OpenAI's two chunk shapes.

Text alone is what nearly every event carries, so its bytes are put together from a prefix made once per choice; anything else goes
through a dict. The order of events: role chunks (chat), text, exactly one finish reason a choice, usage if asked for, `[DONE]`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxinfer.engine.request import RequestOutput
from jaxinfer.engine.service import Increment
from jaxinfer.protocol.errors import error_body
from jaxinfer.protocol.logprobs import chat_logprobs, completion_logprobs
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.response import tool_call
from jaxinfer.protocol.usage import usage
from jaxinfer.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


class ChunkStream:
    """The events of one request. A choice is (prompt, completion): its index is prompt * n + completion, as when not streamed."""

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        *,
        response_id: str,
        created: int,
        model: str,
    ):
        """created: seconds since 1970."""
        request = prepared.request
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._chat = request.chat is not None
        self._n = prepared.params.n
        self._frame: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        choices = range(len(prepared.prompts) * self._n)
        start = b"data: " + _encode(self._frame)[:-1] + b',"choices":[{"index":'
        field = b',"delta":{"content":' if self._chat else b',"text":'
        self._before_text = [start + str(i).encode() + field for i in choices]
        self._after_text = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._generated = [0] * len(choices)  # tokens so far
        self._seen: list[list[int]] = [[] for _ in choices]  # token ids so far, where offsets are asked for
        self._lengths = [0] * len(choices)  # characters so far
        # What a plain text event has no room for.
        self._plain = not (
            prepared.params.logprobs is not None
            or request.return_token_ids
            or request.continuous_usage_stats
            or tokenizer is None
            or prepared.parsing is not None
        )
        parsing = prepared.parsing
        self._parsers = None if parsing is None else [parsing.parser() for _ in choices]

    def opening(self) -> bytes:
        """What comes before any token: nothing, since bench clients take the first chunk with a choice for the first token."""
        return b""

    def advance(self, prompt: int, increment: Increment, output: RequestOutput) -> bytes:
        """The events of what a completion of the prompt-th prompt gained; a chat choice's first have its role before them."""
        i = prompt * self._n + increment.index
        first = not self._generated[i]
        self._generated[i] += len(increment.token_ids)
        role = self._role(i) if first and self._chat else b""
        echo = first and self._prepared.request.echo
        if self._plain and not echo:
            text = role
            if increment.text:
                text += self._before_text[i] + _encode(increment.text) + self._after_text
            if increment.finish_reason is None:
                return text
            return text + self._finish(i, increment)
        return role + self._detailed(i, prompt, increment, output, echo)

    def failure(self, error: dict[str, Any]) -> bytes:
        """The end of a stream that failed; `error` is OpenAI's inner object."""
        return event(error_body(error)) + DONE

    def closing(self, outputs: list[RequestOutput]) -> bytes:
        """The usage chunk if it was asked for, and the end."""
        if not self._prepared.request.include_usage:
            return DONE
        counts = usage(outputs, self._prepared, self._tokenizer)
        return event({**self._frame, "choices": [], "usage": counts}) + DONE

    def _role(self, i: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._chunk(i, {"delta": delta, "logprobs": None, "finish_reason": None})

    def _finish(self, i: int, increment: Increment) -> bytes:
        choice: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice |= {
            "logprobs": None,
            "finish_reason": increment.finish_reason,
            "stop_reason": increment.stop_reason,
        }
        return self._chunk(i, choice)

    def _detailed(
        self, i: int, prompt: int, increment: Increment, output: RequestOutput, echo: bool
    ) -> bytes:
        prepared, request = self._prepared, self._prepared.request
        text, token_ids = increment.text, increment.token_ids
        entries: list[Any] | None = increment.logprobs
        if echo:
            assert self._tokenizer is not None  # prepare has refused it
            given = prepared.prompts[prompt]
            skip = prepared.params.skip_special_tokens
            shown = (
                given.text
                if given.text is not None
                else self._tokenizer.decode(given.token_ids, skip_special_tokens=skip)
            )
            text, token_ids = shown + text, [*given.token_ids, *token_ids]
            if entries is not None:
                entries = [*(output.prompt_logprobs or ()), *entries]
        self._lengths[i] += len(text)
        logprobs = None
        if prepared.params.logprobs is not None and entries is not None:
            logprobs = self._logprobs(i, prompt, token_ids[: len(entries)], entries)
        extra = {"usage": self._usage_so_far(output)} if request.continuous_usage_stats else {}
        if self._parsers is not None:
            return self._parsed(i, increment, logprobs, extra)
        choice: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        choice["logprobs"] = logprobs
        choice["finish_reason"] = increment.finish_reason
        if increment.finish_reason is not None:
            choice["stop_reason"] = increment.stop_reason
        if request.return_token_ids or self._tokenizer is None:
            choice["token_ids"] = increment.token_ids
        return self._chunk(i, choice, **extra)

    def _parsed(self, i: int, increment: Increment, logprobs: Any, extra: dict[str, Any]) -> bytes:
        """A chunk for each thing the parser is certain of; the log-probabilities of the step go with the first."""
        assert self._parsers is not None
        parser, parsing = self._parsers[i], self._prepared.parsing
        assert parsing is not None
        first_call = parser.num_calls
        deltas = parser.push(increment.text)
        if increment.finish_reason is not None:
            deltas += parser.finish()
        shown: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.kind == "call":
                shown.append({"tool_calls": [{"index": first_call, **tool_call(delta)}]})
                first_call += 1
            else:
                shown.append({delta.kind: delta.text})
        if not shown and (logprobs is not None or increment.finish_reason is not None):
            shown.append({})
        chunks = []
        for n, delta in enumerate(shown):
            last = n == len(shown) - 1 and increment.finish_reason is not None
            choice: dict[str, Any] = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
            logprobs = None
            if last:
                reason = parsing.finish_reason(increment.finish_reason, parser.num_calls)
                choice |= {"finish_reason": reason, "stop_reason": increment.stop_reason}
            if n == len(shown) - 1 and self._prepared.request.return_token_ids:
                choice["token_ids"] = increment.token_ids
            chunks.append(self._chunk(i, choice, **extra))
        return b"".join(chunks)

    def _logprobs(self, i: int, prompt: int, token_ids: list[int], entries: list[Any]) -> dict[str, Any]:
        if self._chat:
            assert self._tokenizer is not None
            return chat_logprobs(entries, self._tokenizer)
        seen = self._seen[i]
        shown = completion_logprobs(
            [*seen, *token_ids],
            [None] * len(seen) + entries,
            self._tokenizer,
            text_length=self._lengths[i],
            skip_special_tokens=self._prepared.params.skip_special_tokens,
            prompt_ids=() if self._prepared.request.echo else self._prepared.prompts[prompt].token_ids,
        )
        past = len(seen)
        seen += token_ids
        return {name: values[past:] for name, values in shown.items()}

    def _usage_so_far(self, output: RequestOutput) -> dict[str, Any]:
        prompt = sum(len(p.token_ids) for p in self._prepared.prompts)
        generated = sum(self._generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        }

    def _chunk(self, i: int, choice: dict[str, Any], **extra: Any) -> bytes:
        return event({**self._frame, "choices": [{"index": i, **choice}], **extra})

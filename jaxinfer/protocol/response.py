"""Whole (not streamed) response bodies, from what the engine made of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.request import CompletionOutput, RequestOutput
from jaxinfer.protocol.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from jaxinfer.protocol.prompt import PreparedRequest, Prompt
from jaxinfer.protocol.usage import usage
from jaxinfer.text.parsers import Delta
from jaxinfer.text.tokenizer import Tokenizer


def chat_completion(
    prepared: PreparedRequest,
    output: RequestOutput,
    tokenizer: Tokenizer,
    *,
    response_id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """A `chat.completion` object. `created`: seconds since 1970."""
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_chat_choice(prepared, completion, tokenizer) for completion in output.outputs],
        "usage": usage([output], prepared, tokenizer),
    }
    if _wants_prompt_logprobs(prepared, output):
        body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), tokenizer)
    if prepared.request.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return body


def text_completion(
    prepared: PreparedRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer | None,
    *,
    response_id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """A `text_completion` object; the choices of prompt i have indices i*n to i*n + n-1.

    Without a tokenizer texts are empty, and the choices have token ids whether or not the request asks for them.
    """
    n = prepared.params.n
    choices = [
        completion_choice(prepared, prompt, output, completion, tokenizer, index=i * n + completion.index)
        for i, (prompt, output) in enumerate(zip(prepared.prompts, outputs, strict=True))
        for completion in output.outputs
    ]
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(outputs),
    }


def completion_choice(
    prepared: PreparedRequest,
    prompt: Prompt,
    output: RequestOutput,
    completion: CompletionOutput,
    tokenizer: Tokenizer | None,
    *,
    index: int,
) -> dict[str, Any]:
    """One choice of a text completion, the prompt put before it when the request says echo."""
    skip = prepared.params.skip_special_tokens
    text, token_ids = completion.text, completion.token_ids
    entries = completion.logprobs
    if prepared.request.echo:
        assert tokenizer is not None  # prepare has refused it
        shown = (
            tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)
            if prompt.text is None
            else prompt.text
        )
        text = shown + text
        token_ids = [*prompt.token_ids, *token_ids]
        if entries is not None:
            entries = [*(output.prompt_logprobs or ()), *entries]
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if prepared.params.logprobs is not None and entries is not None:
        choice["logprobs"] = completion_logprobs(
            token_ids[: len(entries)],
            entries,
            tokenizer,
            text_length=len(text),
            skip_special_tokens=skip,
            prompt_ids=() if prepared.request.echo else prompt.token_ids,
        )
    if _wants_prompt_logprobs(prepared, output):
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), tokenizer)
    if prepared.request.return_token_ids or tokenizer is None:
        choice |= {"token_ids": completion.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def failure_of(output: RequestOutput) -> str | None:
    """Why a finished output is no answer (the engine failed or dropped it), or None."""
    for completion in output.outputs:
        if completion.finish_reason in ("error", "abort", None):
            return output.error or "the engine ended the request before it was answered"
    return output.error


def _chat_choice(
    prepared: PreparedRequest, completion: CompletionOutput, tokenizer: Tokenizer
) -> dict[str, Any]:
    wanted = prepared.params.logprobs is not None and completion.logprobs is not None
    message, finish_reason = _message(prepared, completion)
    choice: dict[str, Any] = {
        "index": completion.index,
        "message": message,
        "logprobs": chat_logprobs(completion.logprobs or (), tokenizer) if wanted else None,
        "finish_reason": finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if prepared.request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _message(prepared: PreparedRequest, completion: CompletionOutput) -> tuple[dict[str, Any], str | None]:
    """The assistant's message as the parsers read it, and the finish reason that goes with it."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    parsing = prepared.parsing
    if parsing is None:
        return message, completion.finish_reason
    parser = parsing.parser()
    deltas = parser.push(completion.text) + parser.finish()
    texts = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("content", "reasoning")}
    calls = [tool_call(d) for d in deltas if d.kind == "call"]
    message["content"] = texts["content"] or (None if calls or texts["reasoning"] else "")
    if texts["reasoning"]:
        message["reasoning"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message, parsing.finish_reason(completion.finish_reason, len(calls))


def tool_call(delta: Delta) -> dict[str, Any]:
    """OpenAI's object for a call."""
    return {
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.text},
    }


def _wants_prompt_logprobs(prepared: PreparedRequest, output: RequestOutput) -> bool:
    """Asked for by name, not only computed for an echo."""
    return prepared.request.prompt_logprobs and output.prompt_logprobs is not None

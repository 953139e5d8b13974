"""Bodies of /v1/chat/completions and /v1/completions, and plain batch lines → GenerationRequest.

Defaults: request > `defaults` (server or command line, then the model's generation_config) > OpenAI's.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxinfer.errors import RequestError
from jaxinfer.protocol.convert import read, read_object, wrong
from jaxinfer.protocol.request import ChatPrompt, GenerationRequest
from jaxinfer.protocol.sampling import read_sampling, with_defaults
from jaxinfer.protocol.strict_json import describe
from jaxinfer.protocol.tools import read_tools
from jaxinfer.protocol.types import MAX_PROMPTS, ChatBody, CompletionBody, GenerationFields, One, Several
from jaxinfer.protocol.unsupported import CHAT, COMPLETIONS, refuse_unsupported


def parse_chat_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates the body of a chat completion. Unknown fields are ignored; unsupported ones are refused.

    Raises:
      RequestError: naming the field.
    """
    refuse_unsupported(read_object(body), CHAT)
    merged = with_defaults(body, defaults or {})
    fields = read(merged, ChatBody)
    return GenerationRequest(
        endpoint="chat",
        chat=_read_chat(fields, merged),
        sampling=read_sampling(fields, merged),
        **_read_common(fields),
    )


def parse_completion_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates the body of a text completion. Unknown fields are ignored; unsupported ones are refused.

    Raises:
      RequestError: naming the field.
    """
    refuse_unsupported(read_object(body), COMPLETIONS)
    merged = with_defaults(body, defaults or {})
    fields = read(merged, CompletionBody)
    return GenerationRequest(
        endpoint="completions",
        prompts=read_texts_or_ids(fields.prompt, "prompt"),
        sampling=read_sampling(fields, merged),
        echo=fields.echo or False,
        add_special_tokens=fields.add_special_tokens is not False,
        **_read_common(fields),
    )


def parse_plain_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates `{"prompt": …}` or `{"messages": …}` with sampling fields beside it; unknown fields are errors.

    Raises:
      RequestError: naming the field, and the known field it resembles.
    """
    prompt, messages = read_object(body).get("prompt"), body.get("messages")
    if prompt is not None and messages is not None:
        raise RequestError("give prompt or messages, not both", param="messages")
    chat = "messages" in body
    refuse_unsupported(body, CHAT if chat else COMPLETIONS)
    known = (ChatBody if chat else CompletionBody).__struct_fields__
    for name in body:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.7)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise RequestError(f"unknown field {describe(name)}{hint}", param=name, code="unknown_field")
    if chat:
        return parse_chat_request(body, defaults)
    if prompt is None:
        raise RequestError("a request needs prompt or messages", param="prompt")
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        raise wrong("prompt", "must be one text or one array of token ids: write one line a prompt")
    return parse_completion_request(body, defaults)


def read_texts_or_ids(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either; at most 1024 of them. RequestError names the field."""
    with contextlib.suppress(msgspec.ValidationError):
        return (msgspec.convert(value, One),)
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(value, Several)
    if value == []:
        raise wrong(name, "must not be empty")
    if isinstance(value, list) and len(value) > MAX_PROMPTS and isinstance(value[0], str | list):
        raise wrong(name, f"may hold at most {MAX_PROMPTS}, got {len(value)}")
    raise wrong(
        name, f"must be a text, an array of token ids, or an array of either, got {_first_wrong(value)}"
    )


def _first_wrong(value: Any) -> str:
    if not isinstance(value, list):
        return describe(value)
    kind = type(value[0])
    other = next((one for one in value if type(one) is not kind), value[0])
    return f"one holding {describe(other)}"


def _read_common(fields: GenerationFields) -> dict[str, Any]:
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise wrong("best_of", "other than n is not supported: set n", code="unsupported_parameter")
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise wrong("stream_options", "needs stream: true")
    return {
        "stream": fields.stream or False,
        "include_usage": options is not None and options.include_usage is True,
        "continuous_usage_stats": options is not None and options.continuous_usage_stats is True,
        "prompt_logprobs": fields.prompt_logprobs is not None,
        "return_token_ids": fields.return_token_ids or False,
        "model": fields.model,
        "user": fields.user,
        "priority": fields.priority or 0,
        "cache_salt": fields.cache_salt,
    }


def _read_chat(fields: ChatBody, body: Mapping[str, Any]) -> ChatPrompt:
    """The template gets messages as they were sent."""
    messages = body["messages"]
    for i, message in enumerate(messages):
        if "content" not in message and not message.get("tool_calls"):
            raise wrong(f"messages[{i}].content", "is missing")
    continue_final = fields.continue_final_message or False
    add_generation = fields.add_generation_prompt
    if add_generation is None:
        add_generation = not continue_final
    if continue_final and add_generation:
        raise wrong("continue_final_message", "cannot go with add_generation_prompt: set one of them")
    template_kwargs = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        template_kwargs["reasoning_effort"] = fields.reasoning_effort
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        tools=read_tools(fields, body),
        template_kwargs=template_kwargs,
    )

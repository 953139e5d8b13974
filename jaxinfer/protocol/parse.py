"""Bodies of /v1/chat/completions and /v1/completions, and plain batch lines → GenerationRequest.

Defaults: request > `defaults` (server or command line, then the model's generation_config) > OpenAI's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.protocol.images import IMAGE_PARTS
from jaxinfer.protocol.request import ChatPrompt, Endpoint, GenerationRequest
from jaxinfer.protocol.sampling import SAMPLING_FIELDS, read_sampling, with_defaults
from jaxinfer.protocol.strict_json import Fields, describe, is_integer_list
from jaxinfer.protocol.tools import read_tools
from jaxinfer.protocol.unsupported import refuse_unsupported

_MAX_PROMPTS = 1024
_SALT_LENGTH = 128
_SALT_FORBIDDEN = "@/\\\0"
_INT64 = 2**63

_COMMON_FIELDS = SAMPLING_FIELDS | {
    *("model", "user", "priority", "cache_salt", "stream", "best_of", "return_token_ids"),
}
_COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt", "echo", "add_special_tokens"}
_CHAT_FIELDS = _COMMON_FIELDS | {
    *(
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
    ),
}


def parse_chat_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates the body of a chat completion. Unknown fields are ignored; unsupported ones are refused.

    Raises:
      RequestError: naming the field.
    """
    fields = _prepared_fields(body, defaults)
    if fields.boolean("echo"):
        raise fields.error("echo", "is not supported for chat: remove it", code="unsupported_parameter")
    return GenerationRequest(
        endpoint="chat",
        chat=_read_chat(fields),
        sampling=read_sampling(fields, "chat"),
        **_read_common(fields),
    )


def parse_completion_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates the body of a text completion. Unknown fields are ignored; unsupported ones are refused.

    Raises:
      RequestError: naming the field.
    """
    fields = _prepared_fields(body, defaults)
    echo = fields.boolean("echo")
    return GenerationRequest(
        endpoint="completions",
        prompts=read_texts_or_ids(fields, "prompt"),
        sampling=read_sampling(fields, "completions", echo=echo),
        echo=echo,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        **_read_common(fields),
    )


def parse_plain_request(body: Any, defaults: Mapping[str, Any] | None = None) -> GenerationRequest:
    """Validates `{"prompt": …}` or `{"messages": …}` with sampling fields beside it; unknown fields are errors.

    Raises:
      RequestError: naming the field, and the known field it resembles.
    """
    fields = Fields(body)
    refuse_unsupported(fields)
    if fields.has("prompt") and fields.has("messages"):
        raise RequestError("give prompt or messages, not both", param="messages")
    endpoint: Endpoint = "chat" if "messages" in fields.members else "completions"
    known = _CHAT_FIELDS if endpoint == "chat" else _COMPLETION_FIELDS
    for name in fields.members:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.7)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise RequestError(f"unknown field {describe(name)}{hint}", param=name, code="unknown_field")
    if endpoint == "chat":
        return parse_chat_request(body, defaults)
    if not fields.has("prompt"):
        raise RequestError("a request needs prompt or messages", param="prompt")
    if isinstance(body["prompt"], list) and not is_integer_list(body["prompt"]):
        raise fields.error("prompt", "must be one text or one array of token ids: write one line a prompt")
    return parse_completion_request(body, defaults)


def _prepared_fields(body: Any, defaults: Mapping[str, Any] | None) -> Fields:
    fields = Fields(body)
    refuse_unsupported(fields)
    return Fields(with_defaults(fields.members, defaults or {}))


def _read_common(fields: Fields) -> dict[str, Any]:
    stream = fields.boolean("stream")
    if fields.has("stream_options") and not stream:
        raise fields.error("stream_options", "needs stream: true")
    options = Fields(fields.object("stream_options"), "stream_options")
    return {
        "stream": stream,
        "include_usage": options.boolean("include_usage"),
        "continuous_usage_stats": options.boolean("continuous_usage_stats"),
        "prompt_logprobs": fields.has("prompt_logprobs"),
        "return_token_ids": fields.boolean("return_token_ids"),
        "model": fields.string("model"),
        "user": fields.string("user"),
        "priority": _read_priority(fields),
        "cache_salt": _read_cache_salt(fields),
    }


def _read_priority(fields: Fields) -> int:
    priority = fields.integer("priority", 0)
    if not -_INT64 <= priority < _INT64:
        raise fields.error("priority", "must fit in 64 bits")
    return priority


def _read_cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt")
    if salt is not None and (not 1 <= len(salt) <= _SALT_LENGTH or any(c in salt for c in _SALT_FORBIDDEN)):
        raise fields.error("cache_salt", f"must be 1 to {_SALT_LENGTH} characters without @, /, \\ and NUL")
    return salt


def read_texts_or_ids(fields: Fields, name: str) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either; at most 1024 of them."""
    prompt = fields.get(name)
    if isinstance(prompt, str):
        return (prompt,)
    wanted = "must be a text, an array of token ids, or an array of either"
    if not isinstance(prompt, list):
        raise fields.error(name, "is missing" if prompt is None else f"{wanted}, got {describe(prompt)}")
    if not prompt:
        raise fields.error(name, "must not be empty")
    several = prompt if not is_integer_list(prompt) else [prompt]
    if len(several) > _MAX_PROMPTS:
        raise fields.error(name, f"may hold at most {_MAX_PROMPTS}, got {len(several)}")
    prompts = []
    for one in several:
        if not isinstance(one, str) and not is_integer_list(one):
            raise fields.error(name, f"{wanted}; it holds {describe(one)}")
        prompts.append(one if isinstance(one, str) else tuple(one))
    return tuple(prompts)


def _read_chat(fields: Fields) -> ChatPrompt:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        got = "is missing" if messages is None else f"must be an array of messages, got {describe(messages)}"
        raise fields.error("messages", got)
    if not messages:
        raise fields.error("messages", "must not be empty")
    for i, message in enumerate(messages):
        _check_message(Fields(message, f"messages[{i}]"))

    continue_final = fields.boolean("continue_final_message")
    add_generation = fields.boolean("add_generation_prompt", not continue_final)
    if continue_final and add_generation:
        raise fields.error("continue_final_message", "cannot go with add_generation_prompt: set one of them")
    template_kwargs = dict(fields.object("chat_template_kwargs"))
    if fields.has("reasoning_effort"):
        template_kwargs["reasoning_effort"] = fields.string("reasoning_effort")
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        tools=read_tools(fields),
        template_kwargs=template_kwargs,
    )


def _check_message(fields: Fields) -> None:
    """Checks types only; which roles and orders are allowed is the chat template's word."""
    if not fields.string("role"):
        raise fields.error("role", "is missing")
    content = fields.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(Fields(part, f"{fields.name('content')}[{i}]"))
    elif content is not None and not isinstance(content, str):
        raise fields.error("content", f"must be a string, null or an array of parts, got {describe(content)}")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        fields.string(name)
    calls = fields.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(c, dict) for c in calls)):
        raise fields.error("tool_calls", "must be an array of objects")
    if "content" not in fields.members and not calls:
        raise fields.error("content", "is missing")


def _check_part(fields: Fields) -> None:
    kind = fields.string("type")
    if kind in IMAGE_PARTS:
        value = fields.get("image_url")
        url = value if isinstance(value, str) else Fields(value, fields.name("image_url")).string("url")
        if not url:
            raise fields.error("image_url", "is missing: give a data: URL")
        return
    if kind not in ("text", "input_text", "output_text"):
        problem = (
            "is missing"
            if kind is None
            else f"{describe(kind)} is not supported yet: send text and image_url parts"
        )
        raise fields.error("type", problem, code=None if kind is None else "unsupported_content")
    if fields.string("text") is None:
        raise fields.error("text", "is missing")

"""Brings the messages of a request into the one shape that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.errors import RequestError

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that servers and templates have for it
# Roles of OpenAI's API, and "ipython", Llama 3's name for a tool's answer.
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython"))


def normalize(messages: Any, template_source: str) -> list[dict[str, Any]]:
    """Copies messages so that content is a string, or a list where it holds images, and every role one the template may meet.

    Content null or [] is "", text parts are joined in order with nothing between (but not around images), tool-call arguments that
    are a JSON object in a string become the object, reasoning has the names that templates know, and `developer` is `system` where the template does not
    know the word. RequestError (param "messages") for anything else.
    """
    if not isinstance(messages, list | tuple) or not messages:
        refuse("messages must be a list with at least one message")
    return [_normalize(message, i, template_source) for i, message in enumerate(messages)]


def refuse(message: str) -> NoReturn:
    """Raises RequestError about the messages."""
    raise RequestError(message, param="messages")


def _normalize(message: Any, index: int, source: str) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        refuse(f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str):
        refuse(f"{where}.role must be a string, got {role!r}")
    # A template may know roles of its own; it spells them in quotes.
    if role not in _ROLES and not _quoted(role, source):
        refuse(f"{where}.role {role!r} is unknown; use one of {', '.join(sorted(_ROLES))}")
    if role == "developer" and not _quoted("developer", source):
        role = "system"
    if "content" not in message and not message.get("tool_calls"):
        refuse(f"{where}.content is missing")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    named = {} if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    out = {**message, **named, "role": role, "content": _content(message.get("content"), where)}
    calls = out.pop("tool_calls", None)
    if calls:  # null or [] would look like a call to a template's `is defined`
        if not isinstance(calls, list | tuple):
            refuse(f"{where}.tool_calls must be a list")
        out["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalised messages with the arguments of tool calls as JSON text again."""
    return [
        {**message, "tool_calls": [_text_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _quoted(word: str, source: str) -> bool:
    return f"'{word}'" in source or f'"{word}"' in source


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Text; or, where there are images, the parts in the form that templates know."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, where)
    return [
        {"type": "image"} if _is_image(part) else {"type": "text", "text": _text([part], where)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        refuse(f"{where}.content must be a string or a list of parts, got {type(content).__name__}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text", "input_text", "output_text") or not isinstance(text, str):
            refuse(f"{where}.content[{i}] must be a text part, got {kind or type(part).__name__}")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        refuse(f"{where} must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None  # a model may have written broken JSON: its words stay as they are
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}

"""Tool calls as JSON values, and what the arguments of any call must be: a JSON object that every client can read."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.text.parsers.base import Delta, call

# Models leave line ends in strings as they are. What reaches the client is always strict.
_DECODER = json.JSONDecoder(strict=False)


def dump_arguments(arguments: dict[str, Any]) -> str:
    """JSON text. Raises ValueError for what JSON has no word for (NaN, infinity), RecursionError when nested too deep."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(arguments)
    return text


def read_arguments(text: str) -> str | None:
    """The arguments that a text holds, kept as the model wrote them where that is strict JSON; None if they are no object."""
    try:
        value = _DECODER.decode(text)
        dumped = dump_arguments(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None
    try:
        json.loads(text)
    except ValueError:
        return dumped
    return dumped and text.strip()


def as_call(value: Any, *, bare: bool = False) -> Delta | None:
    """The call that a JSON value is, None if it is none: {"name", "arguments" or "parameters"}, or OpenAI's {"function": …}.

    Args:
      bare: nothing else says that the value is a call; then it must have arguments, if only {}, so that not every object with
        a name passes for a call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or not name.isprintable():
        return None
    if bare and "arguments" not in value and "parameters" not in value:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments)
        return call(name, dump_arguments(arguments)) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        return None


def calls_in(text: str, *, bare: bool = False) -> list[Delta] | None:
    """The calls of a text that is one JSON object or a list of them; None if it is anything else."""
    try:
        value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None
    calls = [as_call(v, bare=bare) for v in (value if isinstance(value, list) else [value])]
    found = [c for c in calls if c is not None]
    return found if found and len(found) == len(calls) else None

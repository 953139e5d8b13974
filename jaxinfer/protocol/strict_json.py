"""Reads JSON from outside strictly: no NaN, no repeated keys, no text that UTF-8 cannot carry."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.errors import RequestError

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def parse_json(text: str | bytes) -> Any:
    """Parses one JSON document.

    Raises:
      RequestError: bad UTF-8, not JSON, NaN or Infinity, a repeated key, a lone surrogate, or nesting too deep.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as e:
        raise RequestError(f"not valid UTF-8 at byte {e.start}", code="invalid_json") from None
    except UnicodeEncodeError:
        raise RequestError(
            "a string holds half of a surrogate pair (\\ud800 to \\udfff): escape whole characters",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise RequestError("JSON is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as e:
        problem = e.msg.removesuffix(" at")  # "Unterminated string starting at"
        raise RequestError(f"not JSON: {problem} at character {e.pos}", code="invalid_json") from None
    except ValueError as e:  # an integer of thousands of digits
        raise RequestError(f"not JSON: {str(e).split(';')[0]}", code="invalid_json") from None
    return value


def describe(value: Any) -> str:
    """A short picture of a JSON value for a message: its text when short, else its kind."""
    shown = repr(value) if isinstance(value, str | int | float | bool) else _KINDS.get(type(value), "")
    return shown if len(shown) <= 60 else shown[:56] + " ..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RequestError(f"the key {describe(key)} is given twice", param=key, code="invalid_json")
            seen.add(key)
    return members


def _refuse_constant(name: str) -> Any:
    raise RequestError(f"{name} is not JSON: numbers must be finite", code="invalid_json")

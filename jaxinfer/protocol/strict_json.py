"""Reads JSON from outside strictly: no NaN, no repeated keys, no text that UTF-8 cannot carry."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jaxinfer.errors import RequestError

MAX_DEPTH = 128
MAX_VALUES = 1_000_000  # such as token ids
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},:]', re.DOTALL)
_MAX_NODES = 100_000  # arrays, objects and their members: each costs far more than a number in an array
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def parse_json(text: str | bytes) -> Any:
    """Parses one JSON document.

    Raises:
      RequestError: bad UTF-8, not JSON, NaN, Infinity or a number beyond float64, a repeated key, a lone surrogate, or nesting too deep.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
        )
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


def check_shape(content: bytes, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> None:
    """Bounds what JSON costs to read, before anything recursive sees it and objects are made of its values.

    Raises:
      RequestError: it is nested too deeply, or holds too many values or members of objects.
    """
    opened = content.count(b"[") + content.count(b"{")
    if opened <= max_depth and content.count(b",") < max_values and content.count(b":") <= _MAX_NODES:
        return  # whatever of them is in strings
    depth = nodes = values = strings = 0
    for token in _TOKEN.finditer(content):
        match content[token.start()]:
            case 0x5B | 0x7B:  # [ {
                depth += 1
                nodes += 1
            case 0x5D | 0x7D:  # ] }
                depth -= 1
            case 0x2C:  # ,
                values += 1
            case 0x3A:  # :
                nodes += 1
            case _:
                strings += 1
        if depth > max_depth:
            raise RequestError(f"the JSON is nested more than {max_depth} deep", code="invalid_json")
        if nodes > _MAX_NODES:
            raise RequestError(
                f"the JSON has more than {_MAX_NODES} arrays, objects and members: send less at once",
                code="invalid_json",
            )
        if max(values, strings // 2) >= max_values:  # a key and a value each
            raise RequestError(
                f"the JSON holds more than {max_values} values: send less at once", code="invalid_json"
            )


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


def _finite(text: str) -> float:
    """json makes infinity of 1e400, and would write it back as no JSON."""
    number = float(text)
    if math.isinf(number):
        raise RequestError(f"{text[:20]} is out of range: numbers must be finite", code="invalid_json")
    return number

"""Reads JSON from outside strictly, and names the field that is wrong.

JSON has one reading here: no NaN, no repeated keys, no text that UTF-8 cannot carry, and a value of the wrong type is
an error, never converted (`"5"` is not 5, `true` is not 1).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import RequestError

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_INTEGER_KEY = re.compile(r"-?[0-9]{1,18}")


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


class Fields:
    """Typed access to the members of one JSON object; `null` reads as absent.

    Args:
      members: the object.
      path: where it stands in the request, such as "messages[0]"; "" for the top level.
    """

    def __init__(self, members: Any, path: str = ""):
        if not isinstance(members, dict):
            raise RequestError(
                f"{path or 'the request'} must be a JSON object, got {describe(members)}", param=path or None
            )
        self.members: Mapping[str, Any] = members
        self.path = path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, problem: str, *, code: str | None = None) -> RequestError:
        name = self.name(key)
        return RequestError(f"{name} {problem}", param=name, code=code)

    def has(self, key: str) -> bool:
        return self.members.get(key) is not None

    def get(self, key: str) -> Any:
        return self.members.get(key)

    def integer(self, key: str, default: Any = None) -> Any:
        value = self.members.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, got {describe(value)}")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        value = self.members.get(key)
        return default if value is None else self._number(key, value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.members.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {describe(value)}")
        return value

    def string(self, key: str, default: Any = None) -> Any:
        value = self.members.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {describe(value)}")
        return value

    def object(self, key: str) -> dict[str, Any]:
        value = self.members.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be a JSON object, got {describe(value)}")
        return value

    def strings(self, key: str, *, lone: bool = False) -> tuple[str, ...]:
        """An array of strings; with `lone`, one bare string counts as an array of one."""
        value = self.members.get(key)
        if value is None:
            return ()
        if lone and isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
            wanted = "a string or an array of strings" if lone else "an array of strings"
            raise self.error(key, f"must be {wanted}, got {_first_wrong(value, str)}")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.members.get(key)
        if value is None:
            return None
        if not is_integer_list(value):
            raise self.error(key, f"must be an array of integers, got {_first_wrong(value, int)}")
        return tuple(value)

    def integer_map(self, key: str) -> dict[int, float] | None:
        """An object whose keys are integers written in decimal and whose values are finite numbers."""
        value = self.members.get(key)
        if value is None:
            return None
        result: dict[int, float] = {}
        for name, number in self.object(key).items():
            if not _INTEGER_KEY.fullmatch(name):
                raise self.error(key, f"keys must be token ids, got {describe(name)}")
            result[int(name)] = self._number(key, number)
        return result

    def _number(self, key: str, value: Any) -> float:
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer beyond float
                number = float(value)
        if not math.isfinite(number):
            raise self.error(key, f"must be a finite number, got {describe(value)}")
        return number


def is_integer_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _first_wrong(value: Any, kind: type) -> str:
    if not isinstance(value, list):
        return describe(value)
    wrong = next(v for v in value if not isinstance(v, kind) or isinstance(v, bool))
    return f"one holding {describe(wrong)}"


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

"""A JSON value as one of jaxinfer.protocol.types, or an error that names the field and says what it must be.

msgspec converts and checks in C. What it says when a value is wrong knows nothing of the value; only then this looks up the value and
what its type allows, for a message a client can act on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
from msgspec import inspect

from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import describe

_PLACE = re.compile(r"(.*) - at (`key` in )?`\$([^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `\w+`")
_WRONG_SIZE = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_WRONG_LENGTH = re.compile(r"Expected `(\w+)` of length (>=|<=) (\d+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")

_KINDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "a JSON object",
}
_SIDES = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_UNITS = {"str": "characters", "array": "items", "object": "members"}
_CONTENT = re.compile(r"(messages|input)\[.*type")
_FILLED = "not be empty"
_UNKNOWN = object()


def read[T](value: Any, type_: type[T]) -> T:
    """Converts strictly: "5" is no integer, and neither is true or 5.0.

    Raises:
      RequestError: `param` is the path of what is wrong, such as "messages[0].role".
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        problem = str(error)
    _explain(problem, value, type_)


def read_object(value: Any) -> dict[str, Any]:
    """The value, which must be a JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"the request must be a JSON object, got {describe(value)}")
    return value


def wrong(name: str, problem: str, *, code: str | None = None) -> RequestError:
    """The error that a field is wrong."""
    return RequestError(f"{name} {problem}", param=name, code=code)


def _explain(said: str, value: Any, type_: Any) -> NoReturn:
    """Raises what msgspec said, in words that fit a request."""
    found = _PLACE.fullmatch(said)
    problem, key, path = found.groups() if found else (said, None, "")
    name, places = "", [_info(type_)]
    for member, index, each in _STEP.findall(path):
        step = member or (int(index) if index else None)
        name += f".{member}" if member else f"[{index}]" if index else ""
        value = _UNKNOWN if each else _member(value, step)
        places = [inner for place in places for inner in _inside(place, step)]
    missing = _MISSING.fullmatch(problem)
    if missing:
        name += f".{missing[1]}"
    name = name.removeprefix(".")
    if missing:
        raise wrong(name, "is missing")
    if key:
        value = _UNKNOWN
        places = [place.key_type for place in _alternatives(places) if isinstance(place, inspect.DictType)]
    wanted = _wanted(problem, value, places)
    which = ": each key" if key else ": each value" if value is _UNKNOWN else ""
    got = "" if value is _UNKNOWN or wanted == _FILLED else f", got {_shown(problem, value)}"
    unsupported = problem.startswith("Invalid ") and _CONTENT.match(name)
    raise RequestError(
        f"{name or 'the request'}{which} must {wanted}{got}",
        param=name or None,
        code="unsupported_content" if unsupported else None,
    )


def _wanted(problem: str, value: Any, places: list[inspect.Type]) -> str:
    """What must be, after "must"."""
    if match := _WRONG_TYPE.fullmatch(problem):
        return f"be {_or(_KINDS.get(kind, kind) for kind in match[1].split(' | ') if kind != 'null')}"
    if isinstance(value, float) and not math.isfinite(value):  # JSON has none, flags do
        return f"be {_KINDS['float']}"
    if match := _WRONG_SIZE.fullmatch(problem):
        return f"be {_SIDES[match[1]]} {match[2].removesuffix('.0')}"
    if match := _WRONG_LENGTH.fullmatch(problem):
        if match[2] == ">=" and match[3] == "1":
            return _FILLED
        return f"have {_SIDES[match[2]]} {match[3]} {_UNITS[match[1]]}"
    if problem.startswith("Invalid "):
        return f"be {_or(str(v) for v in _values(places))}"
    if problem.startswith("Number out of range"):
        return "be a finite number"
    return f"be {_or(_descriptions(places))}"  # a pattern


def _shown(problem: str, value: Any) -> str:
    return str(len(value)) if _WRONG_LENGTH.fullmatch(problem) else describe(value)


def _or(words: Any) -> str:
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


@functools.cache
def _info(type_: Any) -> inspect.Type:
    return inspect.type_info(type_)


def _member(value: Any, step: str | int | None) -> Any:
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None


def _alternatives(places: list[inspect.Type]) -> Iterator[inspect.Type]:
    for place in places:
        if isinstance(place, inspect.Metadata):
            yield from _alternatives([place.type])
        elif isinstance(place, inspect.UnionType):
            yield from _alternatives(list(place.types))
        else:
            yield place


def _inside(place: inspect.Type, step: str | int | None) -> Iterator[inspect.Type]:
    """The types that a member may have; those of all alternatives that have such a member."""
    for one in _alternatives([place]):
        if isinstance(one, inspect.StructType):
            if one.tag_field == step:
                yield inspect.LiteralType((one.tag,))
            yield from (field.type for field in one.fields if field.encode_name == step)
        elif isinstance(one, inspect.ListType | inspect.VarTupleType):
            yield one.item_type
        elif isinstance(one, inspect.DictType):
            yield one.value_type


def _descriptions(places: list[inspect.Type]) -> Iterator[str]:
    for place in places:
        if isinstance(place, inspect.UnionType):
            yield from _descriptions(list(place.types))
        elif isinstance(place, inspect.Metadata):
            yield (place.extra_json_schema or {}).get("description", "of another form")


def _values(places: list[inspect.Type]) -> list[Any]:
    return [
        v for place in _alternatives(places) if isinstance(place, inspect.LiteralType) for v in place.values
    ]

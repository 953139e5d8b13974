"""Tools as Kimi's own tokenizer code hands them to its chat templates: keys sorted, and for K2.5 written in TypeScript.

K2.5 was trained on the TypeScript; its template takes it as the variable `tools_ts_str` and writes JSON only without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.errors import RequestError

_INDENT = "  "
_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_VALUES: dict[Any, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def sort_keys(tools: Sequence[Any]) -> list[Any]:
    """A copy of the tools with the keys of every object in order. RequestError if they are nested too deeply."""
    try:
        return [_sorted(tool) for tool in tools]
    except RecursionError:
        raise RequestError("the tools are nested too deeply", param="tools") from None


def declare(tools: Sequence[Any]) -> str:
    """The functions among sorted tools as a TypeScript namespace; "" if there are none, or if a schema uses what has no
    TypeScript (the model's template then writes all of them as JSON)."""
    try:
        functions = [tool.get("function") for tool in tools if tool.get("type") == "function"]
        declared = [_Function(function).text() for function in functions if function]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ""
    if not declared:
        return ""
    return "\n".join(("# Tools", "", "## functions", "namespace functions {", *declared, "}", ""))


class _Function:
    """One function's declaration, and the interfaces that its parameters refer to."""

    def __init__(self, function: Any):
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_root = False

    def text(self) -> str:
        root = self._function.get("parameters") or {}
        self._read_object(root)
        lines: list[str] = []
        if parameters := "parameters" if self._refers_to_root else "":
            fields = _fields(root, _INDENT)
            lines.append(f"interface {parameters} {_braces([*fields.values()], '')}")
        for name, schema in dict(self._definitions).items():
            self._read(schema)
            lines += _comment(schema.get("description"), "")
            lines.append(f"interface {name} {_type(schema, '')}")
        lines += _comment(self._function.get("description"), "")
        name = self._function.get("name", "function")
        lines.append(f"type {name} = (_: {parameters or _object(root, '')}) => any;")
        return "\n".join(lines)

    def _read(self, schema: Any) -> None:
        """Learns the definitions in a schema, and refuses references to what was not defined before."""
        kind = _kind(schema)
        if kind == "$ref":
            ref = schema["$ref"]
            if ref == "#":
                self._refers_to_root = True
            elif not ref.startswith("#/$defs/") or _name(ref) not in self._definitions:
                raise ValueError(f"unknown reference {ref}")
        elif kind == "anyOf":
            for choice in schema["anyOf"]:
                self._read(choice)
        elif kind == "array":
            self._read(schema.get("items") or True)
        elif kind == "object":
            self._read_object(schema)
        else:
            _type(schema, "")  # refuses values of other types, also where they are not shown

    def _read_object(self, schema: Any) -> None:
        self._definitions |= schema.get("$defs") or {}
        if isinstance(schema.get("additionalProperties"), dict):
            self._read(schema["additionalProperties"])
        for field in schema.get("properties", {}).values():
            self._read(field)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _kind(schema: Any) -> str:
    """What decides how a schema is written: the keyword, "types" for several types, or its type."""
    if isinstance(schema, bool) or schema == {}:
        return "null" if schema is False else "any"
    keyword = next((key for key in ("$ref", "anyOf", "enum") if key in schema), None)
    kind = keyword or ("types" if isinstance(schema["type"], list) else schema["type"])
    if not isinstance(kind, str):
        raise ValueError(f"unknown type {kind}")
    return kind


def _type(schema: Any, indent: str) -> str:
    kind = _kind(schema)
    if kind == "$ref":
        return "parameters" if schema["$ref"] == "#" else _name(schema["$ref"])
    if kind == "anyOf":
        return " | ".join(_type(choice, indent) for choice in schema["anyOf"])
    if kind == "enum":
        return _enum(schema)
    if kind == "types":
        return " | ".join(_TYPES[one] for one in schema["type"])
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema.get("items") or True, indent)
    return "number" if kind == "integer" else kind


def _object(schema: Any, indent: str) -> str:
    inner = indent + _INDENT
    required = set(schema.get("required", ()))
    fields = _fields(schema, inner)
    lines = [fields[name] for name in sorted(fields, key=lambda name: (name not in required, name))]
    if (others := schema.get("additionalProperties")) is not None:
        if not isinstance(others, bool | dict):
            raise ValueError(f"unknown additionalProperties {others}")
        kind = "never" if others is False else _type(others, inner)
        lines.append(f"{inner}[k: string]: {kind}")
    return _braces(lines, indent)


def _braces(fields: Sequence[str], indent: str) -> str:
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _fields(schema: Any, indent: str) -> dict[str, str]:
    """An object's properties by name, each with its comments before it."""
    required = set(schema.get("required", ()))
    fields: dict[str, str] = {}
    for name, field in schema.get("properties", {}).items():
        lines = _comments(field, indent)
        default = field.get("default") if isinstance(field, dict) else None
        if default is not None:
            plain = isinstance(default, int | float)  # these as Python writes them: True, not true
            lines.append(
                f"{indent}// Default: {default if plain else json.dumps(default, ensure_ascii=False)}"
            )
        lines.append(f"{indent}{name}{'' if name in required else '?'}: {_type(field, indent)}")
        fields[name] = "\n".join(lines)
    return fields


def _array(item: Any, indent: str) -> str:
    inner = indent + _INDENT
    comments = _comments(item, inner)
    if not comments:
        return f"Array<{_type(item, indent)}>"
    return "\n".join(("Array<", *comments, inner + _type(item, inner), f"{indent}>"))


def _enum(schema: Any) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [one for one in kind if one != "null"] if len(kind) == 2 else kind
        if len(others) != 1:
            raise ValueError(f"an enum of types {kind}")
        kind = others[0]
    allowed = _VALUES.get(kind, object)
    if not all(value is None or isinstance(value, allowed) for value in schema["enum"]):
        raise ValueError(f"an enum whose values are not of type {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _comments(schema: Any, indent: str) -> list[str]:
    """A type's description and limits, as lines."""
    if isinstance(schema, bool):
        return []
    lines = _comment(schema.get("description"), indent)
    limits = [f"{key}: {schema[key]}" for key in _LIMITS.get(_kind(schema), ()) if key in schema]
    return [*lines, f"{indent}// {', '.join(limits)}"] if limits else lines


def _comment(text: Any, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _name(reference: Any) -> str:
    return reference.split("/")[-1]

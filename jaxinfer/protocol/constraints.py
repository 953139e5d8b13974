"""The form an answer must have, as request fields: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.engine.request import Constraint
from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import Fields, describe

# Field of structured_outputs: kind of constraint.
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def read_constraint(fields: Fields) -> Constraint | None:
    """The constraint that a body asks for, None for free text. RequestError names the field."""
    format_ = _response_format(fields)
    structured = _structured_outputs(fields)
    if format_ is not None and structured is not None:
        raise fields.error("structured_outputs", "cannot go with response_format: give one of them")
    return format_ or structured


def _response_format(fields: Fields) -> Constraint | None:
    if not fields.has("response_format"):
        return None
    format_ = Fields(fields.object("response_format"), "response_format")
    kind = format_.string("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object", param="response_format")
    if kind != "json_schema":
        known = "text, json_object or json_schema"
        raise format_.error("type", f"must be {known}, got {describe(kind)}")
    if not format_.has("json_schema"):
        raise format_.error("json_schema", "is missing")
    holder = Fields(format_.object("json_schema"), "response_format.json_schema")
    if not holder.has("schema"):
        raise holder.error("schema", "is missing")
    return _schema(holder.get("schema"), "response_format")


def _structured_outputs(fields: Fields) -> Constraint | None:
    if not fields.has("structured_outputs"):
        return None
    options = Fields(fields.object("structured_outputs"), "structured_outputs")
    given = [name for name in options.members if options.has(name) and options.get(name) is not False]
    unknown = [name for name in given if name not in _STRUCTURED]
    if unknown:
        raise options.error(unknown[0], f"is not supported; known: {', '.join(_STRUCTURED)}")
    if len(given) > 1:
        raise RequestError(
            f"structured_outputs takes one form, got {' and '.join(given)}", param="structured_outputs"
        )
    if not given:
        return None
    [name] = given
    value = options.get(name)
    if name == "json":
        return _schema(value, "structured_outputs")
    if name == "json_object":
        if options.boolean("json_object"):
            return Constraint("json_object", param="structured_outputs")
        return None
    if name == "choice":
        return Constraint("choice", json.dumps(options.strings("choice")), param="structured_outputs")
    text = options.string(name)
    assert text is not None
    return Constraint("regex" if name == "regex" else "grammar", text, param="structured_outputs")


def _schema(value: Any, param: str) -> Constraint:
    if isinstance(value, str):  # vLLM takes it as text too
        return Constraint("json_schema", value, param=param)
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param}: a JSON schema is an object, got {describe(value)}", param=param)
    return Constraint("json_schema", json.dumps(value), param=param)

"""The form an answer must have, as request fields: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.engine.request import Constraint
from jaxinfer.protocol.convert import wrong
from jaxinfer.protocol.types import (
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)


def read_constraint(fields: GenerationFields, body: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a body asks for, None for free text. RequestError names the field.

    Args:
      body: what `fields` were read from; options that are not known are in it alone.
    """
    format_ = structured = None
    match fields.response_format:
        case JsonObjectFormat():
            format_ = Constraint("json_object", param="response_format")
        case JsonSchemaFormat(json_schema=holder):
            format_ = _schema(holder.schema, "response_format")
    if fields.structured_outputs is not None:
        structured = _structured_outputs(fields.structured_outputs, body["structured_outputs"])
    if format_ is not None and structured is not None:
        raise wrong("structured_outputs", "cannot go with response_format: give one of them")
    return format_ or structured


def _structured_outputs(options: StructuredOutputs, sent: Mapping[str, Any]) -> Constraint | None:
    known = options.__struct_fields__
    given = [name for name, value in sent.items() if value is not None and value is not False]
    for name in given:
        if name not in known:
            raise wrong(f"structured_outputs.{name}", f"is not supported; known: {', '.join(known)}")
    if len(given) > 1:
        raise wrong("structured_outputs", f"takes one form, got {' and '.join(given)}")
    match options:
        case StructuredOutputs(json=schema) if schema is not None and schema is not False:
            return _schema(schema, "structured_outputs")
        case StructuredOutputs(regex=str(text)):
            return Constraint("regex", text, param="structured_outputs")
        case StructuredOutputs(grammar=str(text)):
            return Constraint("grammar", text, param="structured_outputs")
        case StructuredOutputs(choice=list(texts)):
            return Constraint("choice", json.dumps(texts), param="structured_outputs")
        case StructuredOutputs(json_object=True):
            return Constraint("json_object", param="structured_outputs")
    return None


def _schema(value: dict[str, Any] | bool | str, param: str) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value)  # vLLM takes it as text too
    return Constraint("json_schema", text, param=param)

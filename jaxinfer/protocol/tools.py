"""Tools in a request, and what asking for them means: how they are forced, which parser reads the answer.

`auto` leaves it to the model, whose own notation the model's parser reads. `required` and a named function bind the model by grammar
to a JSON list of calls, whatever its own notation, as vLLM does: then a call is certain, and its arguments follow their schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.engine.request import Constraint
from jaxinfer.protocol.convert import wrong
from jaxinfer.protocol.strict_json import describe
from jaxinfer.protocol.types import ChatFields, FunctionName, ToolChoice

FORCED_PARSER = "llama3_json"  # bare JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The functions that an answer may call.

    Attributes:
      functions: as sent, for the chat template: {"type": "function", "function": {…}}.
      choice: "auto", "required", or "named" with the name of the one to call.
      parallel: more than one call is welcome.
    """

    functions: tuple[dict[str, Any], ...]
    choice: Literal["auto", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    def constraint(self) -> Constraint | None:
        """What a forced answer must look like; None for "auto"."""
        if not self.forced:
            return None
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": function.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in (tool["function"] for tool in self.functions)
            if self.name in (None, function["name"])
        ]
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if self.name is not None or not self.parallel:
            schema["maxItems"] = 1
        return Constraint("json_schema", json.dumps(schema), param="tools")

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's: "tool_calls" when the model chose to call, "stop" when it was told which."""
        return "tool_calls" if reason == "stop" and num_calls and self.choice != "named" else reason


def read_tools(fields: ChatFields, body: Mapping[str, Any]) -> Tools | None:
    """The tools of a chat body; None when there are none or tool_choice is "none". RequestError names the field.

    Args:
      body: what `fields` were read from; the template gets its tools as they were sent.
    """
    choice = fields.tool_choice
    if fields.tools is None:
        if choice not in (None, "none"):
            raise wrong("tool_choice", "needs tools")
        return None
    names = {tool.function.name for tool in fields.tools}
    if len(names) < len(fields.tools):
        raise wrong("tools", "must have names of their own")
    for i, tool in enumerate(fields.tools):
        if tool.function.parameters is not None:
            # Checks size, depth and NUL as a constraint's own schema.
            Constraint(
                "json_schema",
                json.dumps(tool.function.parameters),
                param=f"tools[{i}].function.parameters",
            )
    parallel = fields.parallel_tool_calls is not False
    functions = tuple(body["tools"])
    match choice:
        case None | "auto":
            return Tools(functions=functions, parallel=parallel)
        case "none":
            return None
        case "required":
            return Tools(functions=functions, parallel=parallel, choice="required")
        case ToolChoice(function=FunctionName(name=name)):
            if name not in names:
                raise wrong("tool_choice", f"names {describe(name)}, which is not among the tools")
            return Tools(functions=functions, parallel=parallel, choice="named", name=name)

"""Tools in a request, and what asking for them means: how they are forced, which parser reads the answer.

`auto` leaves it to the model, whose own notation the model's parser reads. `required` and a named function bind the model by grammar
to a JSON list of calls, whatever its own notation, as vLLM does: then a call is certain, and its arguments follow their schema.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.engine.request import Constraint
from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import Fields, describe

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TOOLS = 128
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


def read_tools(fields: Fields) -> Tools | None:
    """The tools of a chat body; None when there are none or tool_choice is "none". RequestError names the field."""
    parallel = fields.boolean("parallel_tool_calls", True)
    choice = fields.get("tool_choice")
    if not fields.has("tools"):
        if choice not in (None, "none"):
            raise fields.error("tool_choice", "needs tools")
        return None
    tools = fields.get("tools")
    if not isinstance(tools, list) or not tools:
        raise fields.error("tools", f"must be an array of tools, at least one; got {describe(tools)}")
    if len(tools) > _MAX_TOOLS:
        raise fields.error("tools", f"may hold at most {_MAX_TOOLS} tools, got {len(tools)}")
    names = [_check_tool(Fields(tool, f"tools[{i}]")) for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise fields.error("tools", "must have names of their own")
    shared = {"functions": tuple(tools), "parallel": parallel}
    if choice in (None, "auto"):
        return Tools(**shared)
    if choice == "none":
        return None
    if choice == "required":
        return Tools(**shared, choice="required")
    if not isinstance(choice, dict):
        raise fields.error(
            "tool_choice", f"must be none, auto, required or a function, got {describe(choice)}"
        )
    name = Fields(Fields(choice, "tool_choice").object("function"), "tool_choice.function").string("name")
    if name not in names:
        raise RequestError(
            f"tool_choice names {describe(name)}, which is not among the tools", param="tool_choice"
        )
    return Tools(**shared, choice="named", name=name)


def _check_tool(fields: Fields) -> str:
    kind = fields.string("type")
    if kind != "function":
        raise fields.error("type", f"must be function, got {describe(kind)}")
    function = Fields(fields.object("function"), fields.name("function"))
    name = function.string("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.error("name", "must be 1 to 64 letters, digits, _, . or -")
    function.string("description")
    if function.has("parameters"):
        parameters = function.object("parameters")
        # Checks size, depth and NUL as a constraint's own schema.
        Constraint("json_schema", json.dumps(parameters), param=function.name("parameters"))
    return name

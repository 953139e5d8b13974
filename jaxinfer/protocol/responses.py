"""OpenAI's Responses API over the chat machinery: bodies in, response objects and events out. Nothing is stored.

A body becomes the chat body that asks the same, so both APIs have one set of rules; errors speak of the chat's fields.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxinfer.engine.request import CompletionOutput, RequestOutput
from jaxinfer.engine.service import Increment
from jaxinfer.protocol.convert import read, read_object, wrong
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.types import (
    FlatJsonSchemaFormat,
    FlatToolChoice,
    InputItem,
    JsonObjectFormat,
    ResponsesBody,
    ResponseText,
)
from jaxinfer.protocol.unsupported import RESPONSES, refuse_unsupported
from jaxinfer.protocol.usage import response_usage
from jaxinfer.text.parsers import Delta, OutputParser, make_output_parser
from jaxinfer.text.tokenizer import Tokenizer

_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "user",
    "priority",
    "cache_salt",
    "seed",
    "stop",
)
# What an item of each type cannot do without.
_NEEDED = {"message": ("role",), "function_call": ("name", "call_id"), "function_call_output": ("call_id",)}
_encode = msgspec.json.Encoder().encode


def to_chat_body(body: Any) -> dict[str, Any]:
    """The chat body that asks for what a Responses body does. RequestError for what has no counterpart."""
    refuse_unsupported(read_object(body), RESPONSES)
    fields = read(body, ResponsesBody)
    chat = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    messages = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    chat["messages"] = messages + _messages(fields.input, body["input"])
    if fields.max_output_tokens is not None:
        chat["max_completion_tokens"] = fields.max_output_tokens
    if fields.tools:
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = fields.tool_choice
    if isinstance(choice, FlatToolChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    if choice is not None and (choice != "auto" or fields.tools):
        chat["tool_choice"] = choice
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    match fields.text:
        case ResponseText(format=JsonObjectFormat()):
            chat["response_format"] = {"type": "json_object"}
        case ResponseText(format=FlatJsonSchemaFormat(schema=schema)):
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return chat


def _messages(items: str | list[InputItem], sent: Any) -> list[dict[str, Any]]:
    """sent: what the items were read from."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.type or "message"
        for name in _NEEDED.get(kind, ()):
            if getattr(item, name) is None:
                raise wrong(f"input[{i}].{name}", "is missing")
        if kind == "message":
            messages.append({"role": item.role, "content": sent[i].get("content")})
        elif kind == "function_call":
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)  # calls of one turn belong together
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.output
            content = output if isinstance(output, str | list) else json.dumps(output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


class ResponseObject:
    """Builds the `response` object of a request at any time of its life."""

    def __init__(
        self,
        body: dict[str, Any],
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        *,
        response_id: str,
        created: int,
        model: str,
    ):
        """body: as it was sent; created: seconds since 1970."""
        params = prepared.params
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._frame = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.get("user"),
            "metadata": body.get("metadata") or {},
        }

    def parser(self) -> OutputParser:
        parsing = self._prepared.parsing
        return make_output_parser(None, None) if parsing is None else parsing.parser()

    def at(
        self,
        status: str,
        items: list[dict[str, Any]],
        *,
        error: str | None = None,
        output: RequestOutput | None = None,
    ) -> dict[str, Any]:
        """The object in one of OpenAI's states."""
        return {
            **self._frame,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items,
            "usage": None if output is None else response_usage(output, self._prepared, self._tokenizer),
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        [completion] = output.outputs
        parser = self.parser()
        builder = ItemBuilder()
        for delta in parser.push(completion.text) + parser.finish():
            builder.add(delta)
        builder.close()
        return self.at(status_of(completion), builder.items, output=output)


class ItemBuilder:
    """Turns deltas into output items, and into the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""  # kind of the last item while it grows

    def add(self, delta: Delta) -> list[tuple[str, dict[str, Any]]]:
        """(event name, its fields) in order."""
        if delta.kind == "call":
            return self.close() + self._call(delta)
        events = [] if self._open == delta.kind else self.close() + self._begin(delta.kind)
        item = self.items[-1]
        item["content"][0]["text"] += delta.text
        name = "output_text" if delta.kind == "content" else "reasoning_text"
        return [
            *events,
            (f"response.{name}.delta", {**self._place(), "content_index": 0, "delta": delta.text}),
        ]

    def close(self) -> list[tuple[str, dict[str, Any]]]:
        if not self._open:
            return []
        name = "output_text" if self._open == "content" else "reasoning_text"
        self._open = ""
        item = self.items[-1]
        item["status"] = "completed"
        [part] = item["content"]
        where = {**self._place(), "content_index": 0}
        return [
            (f"response.{name}.done", {**where, "text": part["text"]}),
            ("response.content_part.done", {**where, "part": dict(part)}),
            ("response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}),
        ]

    def _begin(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        self._open = kind
        if kind == "content":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: dict[str, Any] = {"id": _id("msg"), "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": "reasoning", "summary": []}
        item["status"] = "in_progress"
        added = (
            "response.output_item.added",
            {"output_index": len(self.items), "item": {**item, "content": []}},
        )
        self.items.append({**item, "content": [part]})
        return [
            added,
            ("response.content_part.added", {**self._place(), "content_index": 0, "part": dict(part)}),
        ]

    def _call(self, delta: Delta) -> list[tuple[str, dict[str, Any]]]:
        item = {"id": _id("fc"), "type": "function_call", "call_id": delta.call_id, "name": delta.name}
        started = {**item, "arguments": "", "status": "in_progress"}
        self.items.append({**item, "arguments": delta.text, "status": "completed"})
        index = len(self.items) - 1
        return [
            ("response.output_item.added", {"output_index": index, "item": started}),
            ("response.function_call_arguments.delta", {**self._place(), "delta": delta.text}),
            (
                "response.function_call_arguments.done",
                {**self._place(), "name": delta.name, "arguments": delta.text},
            ),
            ("response.output_item.done", {"output_index": index, "item": dict(self.items[-1])}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


class ResponseStream:
    """The events of one streamed response; used as jaxinfer.protocol.stream.ChunkStream is."""

    def __init__(self, response: ResponseObject):
        self._response = response
        self._parser = response.parser()
        self._builder = ItemBuilder()
        self._number = 0

    def opening(self) -> bytes:
        begun = self._response.at("in_progress", [])
        return self._events(
            [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        )

    def advance(self, prompt: int, increment: Increment, output: RequestOutput) -> bytes:
        deltas = self._parser.push(increment.text)
        if increment.finish_reason is not None:
            deltas += self._parser.finish()
        return self._events([event for delta in deltas for event in self._builder.add(delta)])

    def closing(self, outputs: list[RequestOutput]) -> bytes:
        [output] = outputs
        events = self._builder.close()
        status = status_of(output.outputs[0])
        final = self._response.at(status, self._builder.items, output=output)
        return self._events([*events, (f"response.{status}", {"response": final})])

    def failure(self, error: dict[str, Any]) -> bytes:
        """The end of a stream that failed; `error` is OpenAI's inner object."""
        final = self._response.at("failed", self._builder.items, error=error["message"])
        return self._events([("response.failed", {"response": final})])

    def _events(self, events: list[tuple[str, dict[str, Any]]]) -> bytes:
        shown = []
        for name, members in events:
            data = _encode({"type": name, "sequence_number": self._number, **members})
            shown.append(b"event: %b\ndata: %b\n\n" % (name.encode(), data))
            self._number += 1
        return b"".join(shown)


def status_of(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"

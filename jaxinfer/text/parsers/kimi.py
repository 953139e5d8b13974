"""Kimi K2's tool calls: a section of calls, each with an id `functions.NAME:INDEX` and its arguments as JSON."""

from __future__ import annotations

import json

from jaxinfer.text.parsers.base import Delta, Scanner, ToolParser, call, content

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiCalls(ToolParser):
    """Content outside the section is kept, inside only calls count; a call cut off before its end counts if its JSON is whole."""

    needs_special_tokens = True

    def __init__(self) -> None:
        self._scanner = Scanner([_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END])
        self._in_section = False
        self._id: str | None = None  # of the call being read
        self._arguments: str | None = None

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            deltas += self._marker(piece) if is_marker else self._text(piece)
        return deltas

    def finish(self) -> list[Delta]:
        return self._text(self._scanner.finish()) + self._close()

    def _marker(self, marker: str) -> list[Delta]:
        if marker == _ARGUMENTS and self._id is not None:
            self._arguments = ""
            return []
        deltas = self._close()
        if marker == _CALL:
            self._id = ""
            self._in_section = True  # some outputs leave the section's own marker out
        elif marker == _SECTION:
            self._in_section = True
        elif marker == _SECTION_END:
            self._in_section = False
        return deltas

    def _text(self, text: str) -> list[Delta]:
        if self._arguments is not None:
            self._arguments += text
        elif self._id is not None:
            self._id += text
        elif not self._in_section:
            return content(text)
        return []

    def _close(self) -> list[Delta]:
        call_id, arguments = self._id, self._arguments
        self._id = self._arguments = None
        if call_id is None:
            return []
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        try:
            if not name or not isinstance(json.loads(arguments or "{}", strict=False), dict):
                raise ValueError
        except (ValueError, RecursionError):
            return content(f"{call_id}{arguments or ''}")  # no call, and nothing of it is lost
        return [call(name, (arguments or "{}").strip(), call_id)]

"""Kimi K2's tool calls: a section of calls, each with an id `functions.NAME:INDEX` and its arguments as JSON."""

from __future__ import annotations

import re

from jaxinfer.text.parsers.base import Content, Delta, Scanner, ToolParser, call
from jaxinfer.text.parsers.json_calls import read_arguments

_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")  # the model writes both
_SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
KIMI_STARTS = (*_SECTION, _CALL)
_ID = re.compile(r"\s*((?:functions\.)?(\S+?)(?::\d+)?)\s*")  # (id, name)


class KimiCalls(ToolParser):
    """Calls count in a section or without one, text around them is content, and no marker is ever shown.

    A call cut off before its end counts if its arguments are whole.
    """

    needs_special_tokens = True

    def __init__(self) -> None:
        self._scanner = Scanner([*_SECTION, *_SECTION_END, _CALL, _ARGUMENTS, _CALL_END])
        self._content = Content()
        self._id: list[str] | None = None  # of the call being read
        self._arguments: list[str] | None = None

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            deltas += self._marker(piece) if is_marker else self._text(piece)
        return deltas

    def finish(self) -> list[Delta]:
        return self._text(self._scanner.finish()) + self._close(cut_off=True) + self._content.finish()

    def _marker(self, marker: str) -> list[Delta]:
        if marker == _ARGUMENTS and self._id is not None:
            self._arguments = self._arguments or []
            return []
        deltas = self._close()
        if marker == _CALL:
            self._id = []
        return deltas

    def _text(self, text: str) -> list[Delta]:
        if self._arguments is not None:
            self._arguments.append(text)
        elif self._id is not None:
            self._id.append(text)
        else:
            return self._content.text(text)
        return []

    def _close(self, *, cut_off: bool = False) -> list[Delta]:
        if self._id is None:
            return []
        written, given = "".join(self._id), "".join(self._arguments or ())
        self._id = self._arguments = None
        name = _ID.fullmatch(written)
        arguments = read_arguments(given if given.strip() or cut_off else "{}")
        if name is None or not name[2].isprintable() or arguments is None:
            return self._content.text(written + given)
        return self._content.calls([call(name[2], arguments, name[1])])

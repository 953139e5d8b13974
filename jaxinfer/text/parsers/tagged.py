"""Tool calls in tags, as Hermes and Qwen 3 write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from jaxinfer.text.parsers.base import Content, Delta, Scanner, ToolParser
from jaxinfer.text.parsers.json_calls import calls_in

_START, _END = "<tool_call>", "</tool_call>"


class TaggedCalls(ToolParser):
    """Calls in tags, content around them. A call cut off before its end tag counts if its JSON is whole."""

    needs_special_tokens = True  # in some vocabularies the tags are control tokens

    def __init__(self) -> None:
        self._scanner = Scanner([_START, _END])
        self._content = Content()
        self._inside: list[str] | None = None

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            if not is_marker or (piece == _END) == (self._inside is None):
                deltas += self._text(piece)
            elif self._inside is None:
                self._inside = []
            else:
                deltas += self._close(_END)
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._text(self._scanner.finish())
        if self._inside is not None:
            deltas += self._close("")
        return deltas + self._content.finish()

    def _text(self, text: str) -> list[Delta]:
        if self._inside is None:
            return self._content.text(text)
        self._inside.append(text)
        return []

    def _close(self, end: str) -> list[Delta]:
        inside, self._inside = "".join(self._inside or ()), None
        calls = calls_in(inside)
        if calls is not None:
            return self._content.calls(calls)
        # An end tag may be missing between two calls: the start tag of the second is then inside.
        parts = inside.split(_START)
        deltas: list[Delta] = []
        for i, part in enumerate(parts):
            calls = calls_in(part)
            if calls is not None:
                deltas += self._content.calls(calls)
            else:
                deltas += self._content.text(f"{_START}{part}{end if i == len(parts) - 1 else ''}")
        return deltas

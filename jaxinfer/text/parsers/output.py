"""The chain that a completion's text goes through: reasoning, then tool calls, then content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxinfer.text.parsers.base import Delta, Scanner, ToolParser, content

REASONING_START, REASONING_END = "<think>", "</think>"


class Reasoning:
    """Splits off what a model thinks, between <think> and </think>, from what it says.

    Reasoning counts only at the beginning of the text. When the prompt's own end opened it, the text begins inside; text that ends
    inside is all reasoning. The tags must be in the text: where they are control tokens, skip_special_tokens=False.

    Args:
      ends: other markers that end reasoning, each of which is passed on as content.
    """

    def __init__(self, *, inside: bool, ends: Sequence[str] = ()):
        self._scanner = Scanner([REASONING_START, REASONING_END, *ends])
        self._state: Literal["before", "inside", "after", "done"] = "inside" if inside else "before"
        self._ends = frozenset(ends)
        self._unclosed = False  # ended by another marker: a </think> that comes late is not shown
        self._blank: list[str] = []

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            deltas += self._marker(piece) if is_marker else self._text(piece)
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._text(self._scanner.finish())
        blank, self._blank = self._blank, []
        return deltas + content("".join(blank))

    def _marker(self, marker: str) -> list[Delta]:
        if self._state == "before" and marker == REASONING_START:
            self._state, self._blank = "inside", []
            return []
        if self._state == "inside" and marker == REASONING_END:
            self._state = "after"
            return []
        if self._state == "inside" and marker in self._ends:
            self._state, self._unclosed = "done", True
        elif self._unclosed and marker == REASONING_END:
            self._unclosed = False
            return []
        return self._text(marker)

    def _text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._state == "inside":
            return [Delta("reasoning", text)]
        if self._state == "after":  # blank lines between the two belong to neither
            text = text.lstrip("\n")
            if not text:
                return []
            self._state = "done"
        elif self._state == "before":
            self._blank.append(text)
            if not text.strip():
                return []
            text, self._blank, self._state = "".join(self._blank), [], "done"
        return content(text)


class OutputParser:
    """Reads one completion: push its text as it comes, then finish. Any way of cutting the text gives the same message.

    Attributes:
      num_calls: tool calls found so far.
    """

    def __init__(self, reasoning: Reasoning | None, tools: ToolParser):
        self._reasoning = reasoning
        self._tools = tools
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return self._counted(self._tools.push(text))
        return self._through(self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        deltas = [] if self._reasoning is None else self._through(self._reasoning.finish())
        return deltas + self._counted(self._tools.finish())

    def _through(self, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            found += [delta] if delta.kind == "reasoning" else self._counted(self._tools.push(delta.text))
        return found

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if delta.kind == "call":
                self.num_calls += 1
        return deltas

"""What parsers are made of: a scanner that finds markers across cuts, deltas, and the chain reasoning → tool calls → content."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a message. A call comes whole: its name, and its arguments as JSON text."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""  # content or reasoning; a call's arguments
    name: str = ""
    call_id: str = ""


class Scanner:
    """Splits a text that arrives in pieces at literal markers. Text that may be the start of a marker is held back."""

    def __init__(self, markers: Sequence[str]):
        self._pattern = re.compile("|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)))
        self._starts = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._longest = max(map(len, markers)) - 1
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """(is a marker, text) in order."""
        text = self._held + text
        place = 0
        for match in self._pattern.finditer(text):
            if match.start() > place:
                yield False, text[place : match.start()]
            yield True, match[0]
            place = match.end()
        keep = self._viable(text, place)
        self._held = text[keep:]
        if keep > place:
            yield False, text[place:keep]

    def finish(self) -> str:
        """What was held back and became no marker."""
        held, self._held = self._held, ""
        return held

    def _viable(self, text: str, place: int) -> int:
        for start in range(max(place, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)


class ToolParser(ABC):
    """Finds tool calls in content. One object a completion.

    Attributes:
      needs_special_tokens: its markers are control tokens, which must not be left out of the text.
    """

    needs_special_tokens = False

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """What is certain now."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """The rest: what looked like a call and is none becomes content."""


class NoTools(ToolParser):
    """All content."""

    def push(self, text: str) -> list[Delta]:
        return content(text)

    def finish(self) -> list[Delta]:
        return []


class Reasoning:
    """Splits off what a model thinks, between <think> and </think>, from what it says.

    Reasoning counts only at the beginning of the text. When the prompt's own end opened it, the text begins inside; text that ends
    inside is all reasoning.
    """

    def __init__(self, *, inside: bool):
        self._scanner = Scanner(["<think>", "</think>"])
        self._state: Literal["before", "inside", "after", "done"] = "inside" if inside else "before"
        self._blank = ""

    def push(self, text: str) -> list[Delta]:
        deltas = []
        for is_marker, piece in self._scanner.push(text):
            deltas += self._marker(piece) if is_marker else self._text(piece)
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._text(self._scanner.finish())
        blank, self._blank = self._blank, ""
        return deltas + content(blank)

    def _marker(self, marker: str) -> list[Delta]:
        if self._state == "before" and marker == "<think>":
            self._state, self._blank = "inside", ""
            return []
        if self._state == "inside" and marker == "</think>":
            self._state = "after"
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
            self._blank += text
            if not self._blank.strip():
                return []
            text, self._blank, self._state = self._blank, "", "done"
        return content(text)


class OutputParser:
    """The whole chain for one completion.

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
        self.num_calls += sum(delta.kind == "call" for delta in deltas)
        return deltas


def content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []


def call(name: str, arguments: str, call_id: str | None = None) -> Delta:
    return Delta("call", arguments, name, call_id or f"call_{secrets.token_hex(12)}")

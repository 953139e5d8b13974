"""What parsers are made of: deltas, a scanner that finds markers across cuts, content beside calls, and the parser's contract."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Delta(NamedTuple):  # one or two a token: cheaper to make than a frozen dataclass
    """A piece of a message. A call comes whole: its name, and its arguments as JSON text."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""  # content or reasoning; a call's arguments
    name: str = ""
    call_id: str = ""


def content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []


def call(name: str, arguments: str, call_id: str | None = None) -> Delta:
    return Delta("call", arguments, name, call_id or f"call_{secrets.token_hex(12)}")


class Scanner:
    """Splits a text that arrives in pieces at literal markers. Text that may be the start of a marker is held back.

    Every marker begins with "<" and has no other: so only the last one in a text can begin a marker that is not whole yet.
    """

    def __init__(self, markers: Sequence[str]):
        assert all(marker.rfind("<") == 0 for marker in markers)
        self._pattern = re.compile("|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)))
        self._starts = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(is a marker, text) in order."""
        if self._held:
            text, self._held = self._held + text, ""
        if "<" not in text:
            return [(False, text)] if text else []
        parts: list[tuple[bool, str]] = []
        place = 0
        for match in self._pattern.finditer(text):
            if match.start() > place:
                parts.append((False, text[place : match.start()]))
            parts.append((True, match[0]))
            place = match.end()
        start = text.rfind("<", place)
        if start >= 0 and text[start:] in self._starts:
            text, self._held = text[:start], text[start:]
        if len(text) > place:
            parts.append((False, text[place:]))
        return parts

    def finish(self) -> str:
        """What was held back and became no marker."""
        held, self._held = self._held, ""
        return held


class Content:
    """Content beside calls. White space before a call is not shown, nor what separates calls: spaces, `;` and `,`."""

    def __init__(self) -> None:
        self._blank: list[str] = []  # shown once more content follows
        self._after_call = False

    def text(self, text: str) -> list[Delta]:
        kept = text.rstrip()
        if not kept or (self._after_call and all(c.isspace() or c in ";," for c in kept)):
            if text:
                self._blank.append(text)
            return []
        shown = "".join([*self._blank, kept])
        self._blank = [text[len(kept) :]] if len(kept) < len(text) else []
        self._after_call = False
        return content(shown)

    def calls(self, calls: list[Delta]) -> list[Delta]:
        """The same calls, at least one."""
        self._blank, self._after_call = [], True
        return calls

    def finish(self) -> list[Delta]:
        blank, self._blank = "".join(self._blank), []
        return [] if self._after_call else content(blank)


class ToolParser(ABC):
    """Finds tool calls in content. One object a completion. No text makes it raise; a malformed call is content.

    Attributes:
      needs_special_tokens: its markers may be control tokens: the text must be made with skip_special_tokens=False.
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

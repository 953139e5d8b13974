"""Tool calls without tags of their own, anywhere in the text: JSON objects (Llama 3), or Python's notation too (Llama 4)."""

from __future__ import annotations

import re

from jaxinfer.text.parsers.base import Content, Delta, Scanner, ToolParser
from jaxinfer.text.parsers.json_calls import calls_in
from jaxinfer.text.parsers.pythonic import python_calls

# Bounded, so that what is held back for the sake of a start stays small.
_SPACE, _NAME = r"\s{0,32}", r"[^\W\d][\w.\-]{0,127}"
_JSON = rf"\{{{_SPACE}\"|\[{_SPACE}\{{{_SPACE}\""
_PYTHON = rf"\[{_SPACE}{_NAME}{_SPACE}\("
_PARTIAL = re.compile(rf"(?:\[{_SPACE}(?:{_NAME}{_SPACE}|\{{{_SPACE})?|\{{{_SPACE})\Z")
_LONGEST_PARTIAL = 256
_SIGN = re.compile(r"[\\\"'\[\](){}]")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 64


class _Brackets:
    """Finds the end of a bracketed text that arrives in pieces. Signs inside quotes do not count.

    Attributes:
      matched: every bracket was closed by its own; known at the end.
    """

    def __init__(self, quotes: str):
        self._quotes = quotes
        self._quote = ""
        self._escaped = False  # the piece before ended in a backslash
        self._open: list[str] = []
        self.matched = True

    def end(self, text: str, place: int) -> int | None:
        """Where it ends in this piece, reading from `place`; None if it goes on. A wrong bracket ends it too."""
        place += self._escaped
        self._escaped = False
        while (match := _SIGN.search(text, place)) is not None:
            sign, place = match[0], match.end()
            if self._quote:
                if sign == "\\":
                    self._escaped = place == len(text)
                    place += 1
                elif sign == self._quote:
                    self._quote = ""
            elif sign in self._quotes:
                self._quote = sign
            elif sign in _CLOSING:
                self._open.append(_CLOSING[sign])
                if len(self._open) > _MAX_DEPTH:
                    self.matched = False
                    return place
            elif sign in ")]}":
                self.matched = self._open.pop() == sign
                if not self.matched or not self._open:
                    return place
        return None


class _Spans:
    """Splits a text that arrives in pieces into plain text and bracketed spans that may be calls."""

    def __init__(self, *, python: bool):
        self._start = re.compile(f"{_PYTHON}|{_JSON}" if python else _JSON)
        self._brackets: _Brackets | None = None
        self._span: list[str] = []
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(may be calls, text) in order."""
        if self._held:
            text, self._held = self._held + text, ""
        parts: list[tuple[bool, str]] = []
        place = 0
        while place < len(text):
            if self._brackets is None:
                match = self._start.search(text, place)
                start = self._partial(text, place) if match is None else match.start()
                if start > place:
                    parts.append((False, text[place:start]))
                if match is None:
                    self._held = text[start:]
                    break
                place = start
                self._brackets = _Brackets('"' if match[0].endswith('"') else "\"'")
            end = self._brackets.end(text, place)
            self._span.append(text[place:end])
            if end is None:
                break
            parts.append((self._brackets.matched, "".join(self._span)))
            self._brackets, self._span, place = None, [], end
        return parts

    def finish(self) -> str:
        """What was held back, and a span that never ended."""
        rest = "".join(self._span) + self._held
        self._brackets, self._span, self._held = None, [], ""
        return rest

    def _partial(self, text: str, place: int) -> int:
        """Where the end of a text may be the start of a span; its length if nowhere."""
        match = _PARTIAL.search(text, max(place, len(text) - _LONGEST_PARTIAL))
        return len(text) if match is None else match.start()


class BareCalls(ToolParser):
    """Spans that parse are calls, all else is content, shown as soon as a span ends. Markers around calls are never shown."""

    needs_special_tokens = True
    markers: tuple[str, ...]
    python: bool

    def __init__(self) -> None:
        self._scanner = Scanner(self.markers)
        self._spans = _Spans(python=self.python)
        self._content = Content()

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            if is_marker:
                deltas += self._content.text(self._spans.finish())
                continue
            for maybe_calls, part in self._spans.push(piece):
                calls = self._calls(part) if maybe_calls else None
                deltas += self._content.text(part) if calls is None else self._content.calls(calls)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        for maybe_calls, part in self._spans.push(self._scanner.finish()):
            assert not maybe_calls  # what a scanner holds back has no bracket
            deltas += self._content.text(part)
        return deltas + self._content.text(self._spans.finish()) + self._content.finish()

    def _calls(self, text: str) -> list[Delta] | None:
        calls = calls_in(text, bare=True)
        return python_calls(text) if calls is None and self.python else calls


class Llama3Calls(BareCalls):
    """{"name": …, "parameters": {…}}, perhaps after <|python_tag|>, perhaps several with `;` between."""

    markers = ("<|python_tag|>",)
    python = False


class Llama4Calls(BareCalls):
    """[f(a="b"), g(n=1)], or JSON; perhaps between <|python_start|> and <|python_end|>."""

    markers = ("<|python_start|>", "<|python_end|>")
    python = True

"""Tool calls written as JSON objects: Hermes and Qwen 3 in tags, Llama 3 bare."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.text.parsers.base import Delta, Scanner, ToolParser, call, content

_DECODER = json.JSONDecoder(strict=False)


def as_call(value: Any) -> Delta | None:
    """The call that a JSON value is, None if it is none: {"name", "arguments" or "parameters"}, or OpenAI's {"function": …}."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return call(value["name"], json.dumps(arguments, ensure_ascii=False))


def calls_in(text: str) -> list[Delta] | None:
    """The calls of a text that is nothing but JSON objects, or a list of them; `;` or white space between. None if it is not."""
    found: list[Delta] = []
    place = 0
    while place < len(text):
        if text[place] in " \t\r\n;,":
            place += 1
            continue
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        values = value if isinstance(value, list) else [value]
        calls = [as_call(v) for v in values]
        if not calls or any(c is None for c in calls):
            return None
        found += [c for c in calls if c is not None]
    return found or None


class TaggedCalls(ToolParser):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, with content around (Hermes, Qwen 3)."""

    needs_special_tokens = True  # in some vocabularies the tags are control tokens

    def __init__(self) -> None:
        self._scanner = Scanner(["<tool_call>", "</tool_call>"])
        self._inside: str | None = None
        self._blank = ""  # white space that may stand between calls

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for is_marker, piece in self._scanner.push(text):
            if not is_marker or (piece == "</tool_call>") == (self._inside is None):
                deltas += self._text(piece)
            elif self._inside is None:
                self._inside = ""
            else:
                deltas += self._close("</tool_call>")
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._text(self._scanner.finish())
        if self._inside is not None:
            deltas += self._close("")
        return deltas

    def _text(self, text: str) -> list[Delta]:
        if self._inside is not None:
            self._inside += text
            return []
        text = self._blank + text
        kept = len(text.rstrip())
        self._blank = text[kept:]
        return content(text[:kept])

    def _close(self, end: str) -> list[Delta]:
        inside, self._inside = self._inside or "", None
        calls = calls_in(inside)
        if calls is None:
            return self._text(f"<tool_call>{inside}{end}")
        self._blank = ""
        return calls


class BareCalls(ToolParser):
    """The whole text is calls, perhaps after <|python_tag|> (Llama 3): decided at its first character, parsed at its end."""

    needs_special_tokens = True
    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._is_content = False

    def push(self, text: str) -> list[Delta]:
        if self._is_content:
            return content(text)
        self._text += text
        start = self._text.lstrip()
        if not start or start[0] in "{[" or self._TAG.startswith(start[: len(self._TAG)]):
            return []
        self._is_content = True
        return content(self._text)

    def finish(self) -> list[Delta]:
        if self._is_content:
            return []
        calls = calls_in(self._text.strip().removeprefix(self._TAG))
        return content(self._text) if calls is None else calls

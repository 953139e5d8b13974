"""Calls in Python's notation, `[f(a="b"), g.h(n=[1, None])]`: a reader of literals, which evaluates nothing.

Not Python's own parser: models write names and parameters that Python refuses (`get-weather`, `from`), escapes that it warns of
(`"\\d"`), JSON's words for constants, and line ends in strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxinfer.text.parsers.base import Delta, call
from jaxinfer.text.parsers.json_calls import dump_arguments

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string> "[^"\\]*(?:\\.[^"\\]*)*" | '[^'\\]*(?:\\.[^'\\]*)*' )
    | (?P<number> [-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)? )
    | (?P<name>   [^\W\d][\w.\-]* )
    | (?P<sign>   [\[\](){},=:] )
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_ESCAPED["\n"] = ""


def python_calls(text: str) -> list[Delta] | None:
    """The calls of a text that is a list of them and nothing else; None if it is anything else."""
    try:
        return _Reader(text).calls()
    except (ValueError, RecursionError):
        return None


class _Reader:
    """Reads one text by recursive descent. Every method raises ValueError where the text is not what it reads."""

    def __init__(self, text: str):
        self._text = text.rstrip()
        self._place = 0
        self._kind: str | None = None
        self._token = ""
        self._next()

    def calls(self) -> list[Delta]:
        self._expect("[")
        calls = self._until("]", self._call)
        if not calls or self._kind is not None:
            raise ValueError("not a list of calls")
        return calls

    def _call(self) -> Delta:
        name = self._name()
        self._expect("(")
        return call(name, dump_arguments(dict(self._until(")", lambda: (self._name(), self._after("="))))))

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        if kind == "string":
            text = ""
            while self._kind == "string":  # strings in a row are one
                text += _unescape(self._token[1:-1])
                self._next()
            return text
        self._next()
        if kind == "number":
            return int(token) if token.lstrip("+-").isdigit() else float(token)
        if kind == "name":
            if token not in _WORDS:
                raise ValueError("not a literal")
            return _WORDS[token]
        if token == "[":
            return self._until("]", self._value)
        if token == "(":
            return self._until(")", self._value)
        if token == "{":
            return dict(self._until("}", lambda: (_key(self._value()), self._after(":"))))
        raise ValueError("not a value")

    def _until[T](self, end: str, item: Callable[[], T]) -> list[T]:
        """Items with commas between, perhaps one after the last, and the end."""
        items: list[T] = []
        while not self._is_sign(end):
            items.append(item())
            if not self._is_sign(end):
                self._expect(",")
        self._next()
        return items

    def _after(self, sign: str) -> Any:
        self._expect(sign)
        return self._value()

    def _name(self) -> str:
        if self._kind != "name":
            raise ValueError("not a name")
        name = self._token
        self._next()
        return name

    def _expect(self, sign: str) -> None:
        if not self._is_sign(sign):
            raise ValueError(f"not {sign}")
        self._next()

    def _is_sign(self, sign: str) -> bool:
        return self._kind == "sign" and self._token == sign

    def _next(self) -> None:
        if self._place == len(self._text):
            self._kind = None
            return
        match = _TOKEN.match(self._text, self._place)
        if match is None or match.lastgroup is None:
            raise ValueError("not a token")
        self._kind, self._token, self._place = match.lastgroup, match[match.lastgroup], match.end()


def _key(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError("not a key")
    return str(value)


def _unescape(text: str) -> str:
    def shown(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[0])

    try:
        return _ESCAPE.sub(shown, text)
    except OverflowError:
        raise ValueError("no such character") from None

"""Keeps text that others wrote from turning into control tokens, without changing it.

A character that occurs nowhere in the request or the template marks the places, in untrusted text, that a
control token would have to span. It travels through the template with the text; afterwards control tokens
are recognised only where no mark is inside, and the marks go. A request cannot forge a mark, for the
character is chosen so that no input has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # plane 15: no text we know has it, no filter changes it
_WORD = re.compile(r"[\w$-]*")
_TRUSTED_ROLES = frozenset(("system", "developer", "assistant"))


def unused_character(*values: Any) -> str:
    """A private-use character that no string in these values (nested lists and mappings) contains."""
    used: set[str] = set()
    todo: list[Any] = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            used.update(value)
        elif isinstance(value, Mapping):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            todo += value
    for point in _PRIVATE_USE:
        if chr(point) not in used:
            return chr(point)
    raise RequestError("the messages use every private-use character of Unicode's plane 15", param="messages")


def mark_untrusted(tokenizer: Tokenizer, mark: str, messages: Any, *others: Any) -> tuple[Any, ...]:
    """Copies of all with marks in the strings of messages of untrusted roles, and of the others (tools, documents).

    A string gets a mark inside each control token it spells, and at an end where it could be a part of one
    together with what the template puts beside it.
    """
    marker = _Marker(tokenizer, mark)
    try:
        if isinstance(messages, list | tuple):
            messages = [message if _is_trusted(message) else marker.value(message) for message in messages]
        return messages, *map(marker.value, others)
    except RecursionError:
        raise RequestError("the messages are nested too deeply", param="messages") from None


def encode_marked(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Token ids of a marked text without its marks; a spelling with a mark inside is ordinary text."""
    pattern = tokenizer.special_spellings.pattern
    ids: list[int] = []
    done = 0
    for match in pattern.finditer(text) if pattern is not None else ():
        if match.start() > done:
            ids += tokenizer.encode_ordinary(text[done : match.start()].replace(mark, ""), first=done == 0)
        ids += tokenizer.encode(match[0], add_special_tokens=False)
        done = match.end()
    return ids + tokenizer.encode_ordinary(text[done:].replace(mark, ""), first=done == 0)


def _is_trusted(message: Any) -> bool:
    role = message.get("role") if isinstance(message, Mapping) else None
    return isinstance(role, str) and role in _TRUSTED_ROLES


class _Marker:
    def __init__(self, tokenizer: Tokenizer, mark: str):
        self._spellings = tokenizer.special_spellings
        self._mark = mark

    def value(self, value: Any, *, leads: bool = False) -> Any:
        """Marks every string inside; `leads`: these strings are words that a template finds its way by."""
        if isinstance(value, str):
            return self._word(value) if leads else self._text(value)
        if isinstance(value, Mapping):
            return {
                self._word(key): self.value(item, leads=key in ("role", "type"))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item, leads=leads) for item in value]
        return value

    def _word(self, word: Any) -> Any:
        """Keys, roles and types: one word, which may be what a template compares with, stays unless it spells a token."""
        pattern = self._spellings.pattern
        if not isinstance(word, str) or (_WORD.fullmatch(word) and not (pattern and pattern.search(word))):
            return word
        return self._text(word)

    def _text(self, text: str) -> str:
        pattern = self._spellings.pattern
        if not text or pattern is None:
            return text
        before = self._mark if self._spellings.may_have_begun(text) else ""
        after = self._mark if self._spellings.may_go_on(text) else ""
        # Spellings can overlap, so one pass may leave some.
        while (marked := pattern.sub(self._broken, text)) != text:
            text = marked
        return before + text + after

    def _broken(self, match: re.Match[str]) -> str:
        # The match may begin with white space that goes with the token.
        spelling = match[0].lstrip()
        space = match[0][: len(match[0]) - len(spelling)]
        return space + spelling[0] + self._mark + spelling[1:]

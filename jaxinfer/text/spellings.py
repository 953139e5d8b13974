"""How a vocabulary spells its control tokens, prepared for finding them, whole or in part, in text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken


class SpecialSpellings:
    """The spellings of a tokenizer's control tokens.

    Attributes:
      pattern: finds control tokens in text, the longest first, with the white space that goes with them; None if
        there are none.
    """

    def __init__(self, added: Iterable[AddedToken]):
        # One character cannot be broken in two, so a control token of one character is left to be text.
        specials = [t for t in added if t.special and len(t.content.strip()) > 1]
        specials.sort(key=lambda t: len(t.content), reverse=True)
        patterns = [
            (r"\s*" if t.lstrip else "") + re.escape(t.content) + (r"\s*" if t.rstrip else "")
            for t in specials
        ]
        self.pattern = re.compile("|".join(patterns)) if patterns else None
        spellings = [t.content for t in specials]
        self._longest = max(map(len, spellings), default=0)
        self._joined = "\0".join(spellings)
        self._beginnings = {s[:n] for s in spellings for n in range(1, len(s))}
        self._ends = {s[n:] for s in spellings for n in range(1, len(s))}

    def may_go_on(self, text: str) -> bool:
        """Whether a control token could begin in the text and end after it."""
        return any(text[-n:] in self._beginnings for n in self._edge(text)) or self._inside(text)

    def may_have_begun(self, text: str) -> bool:
        """Whether a control token could begin before the text and end in it."""
        return any(text[:n] in self._ends for n in self._edge(text)) or self._inside(text)

    def _edge(self, text: str) -> range:
        return range(1, min(self._longest, len(text) + 1))

    def _inside(self, text: str) -> bool:
        return 0 < len(text) < self._longest and text in self._joined

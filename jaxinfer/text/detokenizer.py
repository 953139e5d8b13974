"""Token ids to text, one at a time, for one completion.

A token enters as bytes. Bytes that may still become a character wait in `_tail`; characters that may still
become a stop string wait in `_held`; everything else is shown at once. Whatever the tokens, what was shown
is a prefix of what will have been shown in the end, so a client may print each piece as it comes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxinfer.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one completion into text as they come, up to the first stop string.

    Without stop strings the pieces joined equal `tokenizer.decode` of all ids. Of several stop strings
    the one that is complete first ends the text (of those complete at once, the longest). Stop strings are
    looked for only in text made by the tokens after the first `min_tokens`.

    Args:
      skip_special_tokens: leave control tokens out of the text.
      stop: strings that end the text; each non-empty.
      include_stop: keep the stop string that ended the text.
      prompt_ids: the tokens before the first one; a tokenizer that drops the space before a text drops it
        here only if no text comes before.
      min_tokens: so many tokens come before stop strings count.

    Attributes:
      stopped: the stop string that ended the text, else None.
    """

    __slots__ = (
        "_first_chars",
        "_held",
        "_include_stop",
        "_parts",
        "_pieces",
        "_size",
        "_stop",
        "_strip",
        "_tail",
        "_texts",
        "_unchecked",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self._pieces = tokenizer.piece_table(skip_special_tokens)
        self._texts = tokenizer.text_table(skip_special_tokens)
        self._size = tokenizer.vocab_size
        self._stop = stop
        self._include_stop = include_stop
        self._first_chars = "".join({s[0] for s in stop})
        self._unchecked = min_tokens if stop else 0
        self._strip = tokenizer.strip_leading_space and tokenizer.special_ids.issuperset(prompt_ids)
        self._tail = b""
        self._held = ""
        self._parts: list[str] = []
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_id: int) -> str:
        """Takes the next token and returns the text that can be shown now; "" after a stop string.

        An id outside the vocabulary adds no text.
        """
        text = self._texts[token_id] if 0 <= token_id < self._size else ""
        if text is None or (self._tail and text):
            data = self._tail + self._pieces[token_id]
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._tail = data[used:]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        if self._stop:
            if self._unchecked:
                self._unchecked -= 1
            else:
                text = self._up_to_stop(text)
        if text:
            self._parts.append(text)
        return text

    def finish(self) -> str:
        """Ends the text and returns what was held back; bytes of an unfinished character show as one U+FFFD."""
        text, self._tail = self._tail.decode("utf-8", errors="replace"), b""
        if self._stop:
            # No more to come: what is held is no beginning of anything.
            text = self._up_to_stop(text) + self._held
            self._held = ""
        if text:
            self._parts.append(text)
        return text

    def _up_to_stop(self, text: str) -> str:
        """Adds text to what is held; returns what can be shown of it, and notes a stop string in it."""
        if self.stopped is not None:
            return ""
        if self._held:
            text = self._held + text
            self._held = ""
        if not any(char in text for char in self._first_chars):
            return text
        match: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (match is None or (start + len(stop), start) < match[:2]):
                match = start + len(stop), start, stop
        if match is not None:
            end, start, self.stopped = match
            return text[: end if self._include_stop else start]
        cut = self._start_of_stop(text)
        self._held = text[cut:]
        return text[:cut]

    def _start_of_stop(self, text: str) -> int:
        """Where the longest end of text begins that may become a stop string; len(text) if none may."""
        earliest = len(text)
        for stop in self._stop:  # whose beginnings are not kept: together they are as long as its square
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, earliest)
            if start >= 0:
                earliest = start
        return earliest

"""Images in prompts, as scheduler and engine see them: what is to be encoded, and who holds which row of the device's buffer.

No JAX in here. A prompt has one placeholder token for each row that a vision tower makes; the rows of one sequence wait in a buffer
on the device from its admission until its prompt is computed, and placeholders are replaced by them as the prompt goes through the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import ConfigError
from jaxinfer.media.item import MediaItem


@dataclass(slots=True, eq=False)
class PromptMedia:
    """The media of one prompt.

    Attributes:
      items: in the order of their placeholders.
      positions: of all placeholders in the prompt, rising.
      rows: of the device's buffer, one a placeholder; empty while none are held.
    """

    items: tuple[MediaItem, ...]
    positions: list[int]
    rows: list[int]

    @property
    def digest(self) -> bytes:
        """Tells prompts apart whose token ids are equal."""
        return hashlib.sha256(b"".join(hashlib.sha256(item.digest).digest() for item in self.items)).digest()

    def needed(self, start: int) -> list[tuple[MediaItem, list[int]]]:
        """Items that have a placeholder at or after position `start`, each with its rows."""
        found, place = [], 0
        for item in self.items:
            end = place + item.num_tokens
            if self.positions[end - 1] >= start:
                found.append((item, self.rows[place:end]))
            place = end
        return found


class MediaRows:
    """The rows of the device's buffer. Methods are all-or-nothing."""

    def __init__(self, total: int):
        if total < 1:
            raise ConfigError(f"max_media_tokens must be at least 1, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, media: PromptMedia) -> bool:
        """A row for each placeholder; False if there are too few now."""
        count = len(media.positions)
        if count > len(self._free):
            return False
        media.rows = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return True

    def give(self, media: PromptMedia) -> None:
        """Takes the rows back, if it holds any."""
        self._free += media.rows
        media.rows = []


def place_media(prompt: Sequence[int], placeholder: int, items: Sequence[MediaItem]) -> PromptMedia:
    """Finds the placeholders of `items` in a prompt; ValueError if there are more or fewer than rows."""
    positions = [i for i, token in enumerate(prompt) if token == placeholder]
    wanted = sum(item.num_tokens for item in items)
    if len(positions) != wanted:
        raise ValueError(
            f"the prompt has {len(positions)} image placeholders (token {placeholder}), its images need {wanted}"
        )
    return PromptMedia(tuple(items), positions, [])

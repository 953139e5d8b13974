"""An image on its way from a processor to a vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """An image (or video) ready for a model's vision tower.

    Attributes:
      pixel_values: as the family's processor makes them, float32.
      grid_thw: patches in time, height and width, for towers that take images of any shape.
      num_tokens: placeholders in the prompt, as many as the tower makes rows.
      digest: of everything that decides the rows: bytes, shape, and the processor's settings.
    """

    pixel_values: Any
    num_tokens: int
    digest: bytes
    grid_thw: tuple[int, int, int] | None = None

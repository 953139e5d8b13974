"""What engine and research ask of a vision tower."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.media.item import MediaItem


class TowerBatch(NamedTuple):
    """Work of one call of a tower's program.

    Attributes:
      size: the program's, one of `VisionTower.sizes`.
      arrays: its argument, a pytree of host arrays.
      num_rows: rows that count; what follows them is padding.
    """

    size: int
    arrays: Any
    num_rows: int


class VisionTower(nnx.Module):
    """Makes rows of the language model's width from images, in programs of a few fixed sizes."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """What programs are compiled for, in the tower's own units (tiles, patches)."""

    @abstractmethod
    def shapes(self, size: int) -> Any:
        """Shapes of `TowerBatch.arrays`."""

    @abstractmethod
    def num_rows(self, size: int) -> int:
        """Rows that a program of this size makes."""

    @abstractmethod
    def batches(self, pixel_values: np.ndarray, grid_thw: tuple[int, int, int] | None) -> list[TowerBatch]:
        """Cuts one image up for the programs. Raises ConfigError for one that is too large."""

    @abstractmethod
    def split(self, pixel_values: np.ndarray, grids: list[list[int]] | None) -> list[MediaItem]:
        """Images whose tiles or patches follow each other, one by one. Raises RequestError when they do not add up."""

    @abstractmethod
    def rows(self, arrays: Any) -> Float[Array, "rows D_text"]:
        """The program: as many rows as fit its size, those of the image first."""

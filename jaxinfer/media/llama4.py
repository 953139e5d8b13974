"""Llama 4's images: as many square tiles as suit the shape, and one tile that shows the whole image.

Follows transformers' Llama4ImageProcessor to the pixel where Pillow resizes as PyTorch does, and within one step of 255 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from jaxinfer.config.vision import Llama4VisionConfig
from jaxinfer.errors import ConfigError
from jaxinfer.media.images import RGBImage
from jaxinfer.media.item import MediaItem
from jaxinfer.media.processor import ImageProcessor, PromptImage, looked_up, padded, resized

_BILINEAR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4ImageProcessor(ImageProcessor):
    """Tiles of an image and the tokens around them.

    Attributes:
      tile: pixels along a tile's side.
      tokens_per_tile: rows that the tower makes of a tile.
      max_tiles: without the one of the whole image.
      largest_canvas: images are enlarged as far as max_tiles allow.
      resample: Pillow's number of a filter.
      mean, std: of each channel, where 1 is white.
    """

    PLACEHOLDER = "<|image|>"
    ROW_TOKEN = "<|patch|>"

    tile: int
    tokens_per_tile: int
    max_tiles: int = 16
    largest_canvas: bool = False
    resample: int = _BILINEAR
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.max_tiles < 1:
            raise ConfigError(f"max_patches must be at least 1 tile, got {self.max_tiles}")

    @classmethod
    def from_hf(cls, preprocessor: Mapping[str, Any], vision: Llama4VisionConfig) -> Llama4ImageProcessor:
        """Reads a preprocessor_config.json; what it leaves out is as published."""
        size = preprocessor.get("size") or {"height": vision.image_size, "width": vision.image_size}
        if size != {"height": vision.image_size, "width": vision.image_size}:
            raise ConfigError(
                f"preprocessor_config.json makes tiles of {size}, but the vision tower takes image_size={vision.image_size}"
            )
        return cls(
            tile=vision.image_size,
            tokens_per_tile=vision.tokens_per_tile,
            max_tiles=int(preprocessor.get("max_patches") or 16),
            largest_canvas=bool(preprocessor.get("resize_to_max_canvas", False)),
            resample=int(preprocessor.get("resample", _BILINEAR)),
            mean=tuple(preprocessor.get("image_mean") or (0.5, 0.5, 0.5)),
            std=tuple(preprocessor.get("image_std") or (0.5, 0.5, 0.5)),
        )

    def __call__(self, image: RGBImage) -> PromptImage:
        """pixel_values float32 [tiles, 3, tile, tile], row by row, the whole image last."""
        pixels, side = image.pixels, self.tile
        rows, columns = self.canvas(*pixels.shape[:2])
        height, width = self.fitted(pixels.shape[:2], (rows, columns))
        canvas = padded(resized(pixels, height, width, self.resample), rows * side, columns * side)
        table = self._values()
        cut = looked_up(canvas, table).reshape(rows, side, columns, side, 3)
        tiles = cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        if len(tiles) > 1:
            whole = looked_up(resized(pixels, side, side, self.resample), table).transpose(2, 0, 1)
            tiles = np.concatenate([tiles, whole[None]])
        item = MediaItem(
            pixel_values=np.ascontiguousarray(tiles),
            num_tokens=len(tiles) * self.tokens_per_tile,
            digest=self.digest(image),
        )
        return PromptImage(item, self.tokens(rows, columns))

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tiles that an image of this size goes on.

        Of all canvases the one that enlarges the image least; else, where each makes it smaller, the one that does so least.
        Among equals, the smallest.
        """
        counts = range(1, self.max_tiles + 1)
        shapes = np.array([(r, c) for r in counts for c in counts if r * c <= self.max_tiles])
        # In float32, as the reference decides which are equal.
        scales = (np.float32(self.tile) * shapes / np.array([height, width], np.float32)).min(axis=1)
        enlarging = scales[scales >= 1]
        if not enlarging.size:
            best = scales.max()
        else:
            best = enlarging.max() if self.largest_canvas else enlarging.min()
        rows, columns = min(shapes[scales == best].tolist(), key=math.prod)
        return rows, columns

    def fitted(self, size: tuple[int, ...], canvas: tuple[int, int]) -> tuple[int, int]:
        """Height and width that an image gets on a canvas of so many tiles: its own shape, enlarged to no more than one tile."""
        sides, scales = [], []
        for length, count in zip(size, canvas, strict=True):
            whole, needed = count * self.tile, max(length, self.tile)
            own = needed <= whole and not self.largest_canvas
            sides.append(needed if own else whole)
            # The reference divides tensors where the canvas limits, plain numbers elsewhere; floor() shows the difference.
            scales.append(needed / length if own else np.float32(whole) / np.float32(length))
        if scales[1] < scales[0]:
            sides[0] = max(1, min(math.floor(size[0] * scales[1]), sides[0]))
        else:
            sides[1] = max(1, min(math.floor(size[1] * scales[0]), sides[1]))
        return sides[0], sides[1]

    def tokens(self, rows: int, columns: int) -> tuple[str, ...]:
        """The layout that the model was trained with."""
        tile = (self.ROW_TOKEN,) * self.tokens_per_tile
        followed = (*tile, "<|tile_x_separator|>")
        row = (*followed * (columns - 1), *tile, "<|tile_y_separator|>")
        tiles = row * rows if rows * columns > 1 else ()
        return ("<|image_start|>", *tiles, self.PLACEHOLDER, *tile, "<|image_end|>")

    def _values(self) -> Float[np.ndarray, "256 3"]:
        """The model was trained on values that were rounded to bfloat16 after each step."""

        def rounded(values: Any) -> np.ndarray:
            return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)

        shades = rounded(np.arange(256, dtype=np.float32) * np.float32(1 / 255))[:, None]
        return rounded(rounded(shades - rounded(self.mean)) / rounded(self.std))

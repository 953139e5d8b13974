"""Kimi K2.5's images: in their own shape, made smaller only where they have too many patches, and padded to whole rows.

Follows the release's processor, which resizes with Pillow as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.config.vision import MoonViTConfig
from jaxinfer.errors import ConfigError
from jaxinfer.media.images import RGBImage
from jaxinfer.media.item import MediaItem
from jaxinfer.media.processor import ImageProcessor, PromptImage, looked_up, padded, resized

_BICUBIC = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiImageProcessor(ImageProcessor):
    """Patches of an image, and a token for each square of them.

    Attributes:
      patch: pixels along a patch's side.
      merge: patches along the side of a square that becomes one row.
      max_patches: before padding.
      max_side: patches along a side.
      resample: Pillow's number of a filter.
      mean, std: of each channel, where 1 is white.
    """

    PLACEHOLDER = "<|media_pad|>"
    ROW_TOKEN = "<|media_pad|>"

    patch: int
    merge: int = 2
    max_patches: int = 16_384
    max_side: int = 512
    resample: int = _BICUBIC
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if min(self.max_patches, self.max_side) < 1:
            raise ConfigError(
                f"max_patches={self.max_patches} and the limit of {self.max_side} patches a side must be at least 1"
            )

    @classmethod
    def from_hf(cls, preprocessor: Mapping[str, Any], vision: MoonViTConfig) -> KimiImageProcessor:
        """Reads a preprocessor_config.json in the release's style (media_proc_cfg) or transformers'."""
        settings = preprocessor.get("media_proc_cfg") or preprocessor
        if settings.get("fixed_output_tokens") is not None:
            raise ConfigError("preprocessor_config.json: fixed_output_tokens is not supported, leave it null")
        if vision.merge[0] != vision.merge[1]:
            raise ConfigError(f"merge_kernel_size={vision.merge} is not a square, as images are cut for")
        merge = settings.get("merge_size") or settings.get("merge_kernel_size") or vision.merge[0]
        merge = int(merge[0] if isinstance(merge, list | tuple) else merge)
        patch = int(settings.get("patch_size") or vision.patch_size)
        if (patch, merge) != (vision.patch_size, vision.merge[0]):
            raise ConfigError(
                f"preprocessor_config.json has patch_size={patch} and merge_size={merge}, but the vision tower "
                f"takes {vision.patch_size} and {vision.merge[0]}"
            )
        size = settings.get("size") or {}
        return cls(
            patch=patch,
            merge=merge,
            max_patches=int(settings.get("max_patches") or settings.get("in_patch_limit") or 16_384),
            max_side=int(settings.get("patch_limit_on_one_side") or size.get("max_height") or 512),
            resample=int(settings.get("resample", _BICUBIC)),
            mean=tuple(settings.get("image_mean") or (0.5, 0.5, 0.5)),
            std=tuple(settings.get("image_std") or (0.5, 0.5, 0.5)),
        )

    def __call__(self, image: RGBImage) -> PromptImage:
        """pixel_values float32 [patches, 3, patch, patch], row by row."""
        height, width = self.fitted(*image.pixels.shape[:2])
        unit = self.patch * self.merge
        canvas = resized(image.pixels, height, width, self.resample)
        canvas = padded(canvas, -(-height // unit) * unit, -(-width // unit) * unit)
        rows, columns = (side // self.patch for side in canvas.shape[:2])
        cut = looked_up(canvas, self._values()).reshape(rows, self.patch, columns, self.patch, 3)
        patches = cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, self.patch, self.patch)
        item = MediaItem(
            pixel_values=np.ascontiguousarray(patches),
            num_tokens=rows * columns // self.merge**2,
            digest=self.digest(image),
            grid_thw=(1, rows, columns),
        )
        return PromptImage(item, (self.ROW_TOKEN,) * item.num_tokens)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image gets before it is padded, pixels; never larger than it is."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        longest = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / patches), longest / height, longest / width)
        new_height, new_width = (min(max(1, int(side * scale)), longest) for side in (height, width))
        return new_height, new_width

    def _values(self) -> Float[np.ndarray, "256 3"]:
        shades = np.arange(256)[:, None] / 255
        return ((shades - np.array(self.mean)) / np.array(self.std)).astype(np.float32)

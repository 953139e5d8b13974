"""What an image becomes in a prompt: values for the vision tower, and tokens that hold their places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from jaxinfer.errors import RequestError
from jaxinfer.media.images import RGBImage, digest_of
from jaxinfer.media.item import MediaItem


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image ready for a prompt.

    Attributes:
      tokens: spellings of the control tokens that take the place of the template's placeholder; `row_token` among them
        stands for the rows of the tower, as many times as item.num_tokens.
    """

    item: MediaItem
    tokens: tuple[str, ...]


class ImageProcessor(ABC):
    """A family's way to prepare images. Processors are frozen dataclasses: their repr says all that decides the values."""

    PLACEHOLDER: ClassVar[str]  # what chat templates write for an image
    ROW_TOKEN: ClassVar[str]  # stands for one row of the vision tower

    @abstractmethod
    def __call__(self, image: RGBImage) -> PromptImage:
        """Resizes, cuts and normalises."""

    def digest(self, image: RGBImage) -> bytes:
        """Tells apart all that can come out differently: files, and settings of the processor."""
        return digest_of(type(self).__name__.encode(), repr(self).encode(), image.digest)


def expand_placeholders(
    token_ids: Sequence[int], placeholder: int, images: Sequence[Sequence[int]]
) -> list[int]:
    """A prompt with each image's tokens in place of its placeholder.

    Raises RequestError when there are not as many placeholders as images: the template drops images, or text spells one.
    """
    found = sum(token == placeholder for token in token_ids)
    if found != len(images):
        raise RequestError(
            f"the prompt has {found} places for images (token {placeholder}), but {len(images)} images came with it: "
            "keep image tokens out of the text, and send images where the chat template takes them",
            param="messages",
        )
    expanded: list[int] = []
    remaining = iter(images)
    for token in token_ids:
        expanded += next(remaining) if token == placeholder else (token,)
    return expanded


def resized(
    pixels: UInt8[np.ndarray, "height width 3"], height: int, width: int, resample: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resampled by Pillow; resample: as preprocessor_config.json numbers the filters."""
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(image)


def padded(
    pixels: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """With black at the right and below."""
    return np.pad(pixels, ((0, height - pixels.shape[0]), (0, width - pixels.shape[1]), (0, 0)))


def looked_up(
    pixels: UInt8[np.ndarray, "height width 3"], table: Float[np.ndarray, "256 3"]
) -> Float[np.ndarray, "height width 3"]:
    """What each of 256 values becomes in each channel."""
    return table[pixels, np.arange(3)]

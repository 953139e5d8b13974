"""From the bytes of an image file to an array of its pixels, within limits that are checked before anything large is decoded.

Files come from strangers: no more formats than clients send, one picture a file, and whatever a decoder raises is a
fault of the file.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from jaxinfer.errors import ConfigError, RequestError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_MOST_PREVIEWS = 4  # further pictures in a camera's JPEG (MPO), which are left alone
_ORIENTATION = 0x0112  # EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one image may be."""

    max_bytes: int = 20 * 2**20  # of the file
    max_pixels: int = 64 * 2**20  # decoded, width x height

    def __post_init__(self) -> None:
        most = Image.MAX_IMAGE_PIXELS or 2**31  # Pillow's own guard
        if self.max_bytes < 1 or not 1 <= self.max_pixels <= most:
            raise ConfigError(
                f"an image's max_bytes={self.max_bytes} must be at least 1, and max_pixels={self.max_pixels} between 1 and {most}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class RGBImage:
    """Pixels as they are to be looked at, and a digest of the file they came from: its bytes, size and colour mode."""

    pixels: UInt8[np.ndarray, "height width 3"]
    digest: bytes


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 over parts of any lengths, such that moving bytes from one part to the next changes it."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def decode_image(data: bytes, limits: ImageLimits) -> RGBImage:
    """Decodes a JPEG, PNG, WebP or GIF file: turned as its EXIF data says, transparent parts on white.

    Raises RequestError (code "invalid_image"): too large, animated, damaged, or of another kind.
    """
    if len(data) > limits.max_bytes:
        raise _refusal(
            f"an image has {len(data)} bytes, at most {limits.max_bytes} are allowed: make it smaller"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image, limits)
            mode, size = image.mode, image.size
            image.load()
            pixels = _rgb(image)
            pixels = _turned(pixels, _orientation(image))
    except RequestError:
        raise
    except Image.UnidentifiedImageError:
        raise _refusal(f"an image is not a {', '.join(FORMATS)} file: convert it to one") from None
    except Exception as error:  # decoders raise many kinds on damaged files
        raise _refusal(f"an image cannot be decoded ({error}): send it again, or as another format") from None
    return RGBImage(pixels, digest_of(data, mode.encode(), b"%d x %d" % size))


def _check(image: Image.Image, limits: ImageLimits) -> None:
    """On what the file's header says."""
    width, height = image.size
    if width * height > limits.max_pixels:
        raise _refusal(
            f"an image of {width} x {height} has more than the {limits.max_pixels} pixels that are allowed: make it smaller"
        )
    if image.format == "MPO" and getattr(image, "n_frames", 1) <= 1 + _MOST_PREVIEWS:
        return
    # Asked so, a GIF is read up to its second picture and not to its end.
    if getattr(image, "is_animated", False):
        raise _refusal("an image has more than one frame: send one frame")


def _rgb(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to its low byte
        grey = np.clip(np.asarray(image).astype(np.int32) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image.getchannel("A"))
    return np.asarray(canvas)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the picture is whole, only what was written about it is not
        return 1


def _turned(
    pixels: UInt8[np.ndarray, "height width 3"], orientation: object
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_image")

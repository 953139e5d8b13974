"""Image files of all modes and turns, and those that a stranger would send to break a decoder."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.media.images import ImageLimits, decode_image, digest_of

LIMITS = ImageLimits()
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (6, 9, 3), np.uint8)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, rows: bytes = b"") -> bytes:
    """A PNG written out by hand."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    framed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        decode_image(data, limits)
    assert caught.value.code == "invalid_image"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_colours_come_through(kind: str):
    data = file_of(Image.fromarray(COLOURS), kind, lossless=True)
    image = decode_image(data, LIMITS)
    np.testing.assert_array_equal(image.pixels, COLOURS)
    assert image.pixels.dtype == np.uint8


@pytest.mark.parametrize("mode", ["1", "L", "P"])
@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_grey_and_palettes(mode: str, kind: str):
    source = Image.fromarray(COLOURS).convert(mode)
    expected = np.asarray(source.convert("RGB"))
    np.testing.assert_array_equal(decode_image(file_of(source, kind), LIMITS).pixels, expected)


def test_transparent_parts_are_white():
    alpha = np.array([[0, 51, 255]], np.uint8)
    black = Image.fromarray(np.dstack([np.zeros((1, 3, 3), np.uint8), alpha]))
    for data in (file_of(black), file_of(black, "WEBP", lossless=True), file_of(black.convert("LA"))):
        np.testing.assert_array_equal(decode_image(data, LIMITS).pixels[0, :, 0], [255, 204, 0])
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    for kind in ("PNG", "GIF"):
        pixels = decode_image(file_of(palette, kind, transparency=0), LIMITS).pixels
        np.testing.assert_array_equal(pixels, [[[255] * 3, [40, 50, 60]]])
    keyed = file_of(Image.fromarray(COLOURS), transparency=tuple(COLOURS[0, 0].tolist()))
    np.testing.assert_array_equal(decode_image(keyed, LIMITS).pixels[0, 0], [255] * 3)


def test_sixteen_bits_keep_their_high_byte():
    values = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    grey = png(5, 1, depth=16, colour=0, rows=b"\0" + values.astype(">u2").tobytes())
    np.testing.assert_array_equal(decode_image(grey, LIMITS).pixels[0, :, 1], [0, 0, 1, 0x80, 0xFF])
    colour = png(1, 1, depth=16, colour=2, rows=b"\0" + np.array([0x1234, 0, 0xFFFF], ">u2").tobytes())
    np.testing.assert_array_equal(decode_image(colour, LIMITS).pixels[0, 0], [0x12, 0, 0xFF])


@pytest.mark.parametrize(("mode", "fill"), [("CMYK", (0, 255, 255, 0)), ("RGB", (255, 0, 0)), ("L", 90)])
def test_jpeg_modes(mode: str, fill: Any):
    data = file_of(Image.new(mode, (16, 8), fill), "JPEG", quality=95)
    expected = (90, 90, 90) if mode == "L" else (255, 0, 0)
    pixels = decode_image(data, LIMITS).pixels
    assert pixels.shape == (8, 16, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_turned_as_the_camera_was(orientation: int, kind: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(Image.fromarray(COLOURS), kind, exif=exif, lossless=True)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert expected is not None
    np.testing.assert_array_equal(decode_image(data, LIMITS).pixels, np.asarray(expected))


def test_damaged_exif_does_no_harm():
    for exif in (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        data = file_of(Image.fromarray(COLOURS), exif=exif)
        np.testing.assert_array_equal(decode_image(data, LIMITS).pixels, COLOURS)


def test_bytes_are_limited():
    data = file_of(Image.fromarray(COLOURS))
    assert decode_image(data, ImageLimits(max_bytes=len(data))).pixels.shape == (6, 9, 3)
    assert f"{len(data)} bytes" in refusal(data, ImageLimits(max_bytes=len(data) - 1))


def test_pixels_are_limited():
    data = file_of(Image.fromarray(COLOURS))
    assert decode_image(data, ImageLimits(max_pixels=54)).pixels.shape == (6, 9, 3)
    assert "9 x 6" in refusal(data, ImageLimits(max_pixels=53))


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_decompression_bombs_are_refused_by_their_header(side: int):
    """A few hundred bytes that would be gigabytes."""
    refusal(png(side, side, depth=1, colour=0, rows=bytes(1000)))


def animated(kind: str, frames: int) -> bytes:
    images = [Image.fromarray(RNG.integers(0, 256, (8, 8, 3), np.uint8)) for _ in range(frames)]
    return file_of(images[0], kind, save_all=True, append_images=images[1:])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_one_frame_only(kind: str):
    assert decode_image(animated(kind, 1), LIMITS).pixels.shape == (8, 8, 3)
    for frames in (2, 40):
        assert "one frame" in refusal(animated(kind, frames))


def test_a_camera_s_previews_are_left_alone():
    """Phones put further pictures behind a JPEG (MPO); a thousand of them are no previews."""
    assert decode_image(animated("MPO", 3), LIMITS).pixels.shape == (8, 8, 3)
    assert "one frame" in refusal(animated("MPO", 1000))


def test_other_formats_are_refused():
    image = Image.fromarray(COLOURS)
    for kind in ("BMP", "TIFF", "ICO", "PPM"):
        assert "JPEG, PNG, WEBP, GIF" in refusal(file_of(image, kind))
    for data in (b"", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", bytes(100)):
        refusal(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncated_files_are_refused(kind: str):
    data = file_of(Image.fromarray(RNG.integers(0, 256, (40, 40, 3), np.uint8)), kind)
    for end in range(0, len(data) * 3 // 4, max(1, len(data) // 40)):
        refusal(data[:end])


@given(st.data())
def test_damage_never_raises_anything_else(data: st.DataObject):
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF"]))
    file = bytearray(file_of(Image.fromarray(COLOURS), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    # Whatever else it raises fails the test.
    with contextlib.suppress(RequestError):
        assert decode_image(bytes(file), ImageLimits(max_pixels=10_000)).pixels.size <= 30_000


def test_digests_tell_files_apart():
    image = Image.fromarray(COLOURS)
    first = decode_image(file_of(image), LIMITS).digest
    assert decode_image(file_of(image), ImageLimits(max_pixels=60)).digest == first
    assert decode_image(file_of(image, compress_level=0), LIMITS).digest != first
    assert len({first, digest_of(b"ab", b"c"), digest_of(b"a", b"bc"), digest_of(b"abc")}) == 4


@pytest.mark.parametrize("limits", [{"max_bytes": 0}, {"max_pixels": 0}, {"max_pixels": 10**9}])
def test_limits_that_cannot_be(limits: dict[str, int]):
    with pytest.raises(ConfigError):
        ImageLimits(**limits)

"""Processors of Llama 4 and Kimi against transformers 5.24 (with torchvision 0.28.0).

processed.safetensors holds what its processors make of `pattern` images: Llama 4's with tiles of 12 pixels and max_patches=6
("_large": resize_to_max_canvas), Kimi's with patch_size=4, max_patches=40 and ten patches a side; and "_sizes", with the
published settings: height, width, resize_to_max_canvas, rows and columns of tiles, height and width after resizing for Llama 4;
height, width, both after resizing and both after padding for Kimi. Some were picked because float64 arithmetic gives another size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxinfer.config.vision import Llama4VisionConfig, MoonViTConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.media.images import RGBImage, digest_of
from jaxinfer.media.kimi import KimiImageProcessor
from jaxinfer.media.llama4 import Llama4ImageProcessor
from jaxinfer.media.processor import expand_placeholders

EXPECTED = load_file(Path(__file__).parent / "processed.safetensors")
STEP = 1 / 127.5  # what one of 255 steps is after normalisation
SCOUT = Llama4VisionConfig(
    image_size=336,
    patch_size=14,
    hidden_size=1408,
    intermediate_size=5632,
    num_layers=34,
    num_heads=16,
    adapter_size=4096,
    text_hidden_size=5120,
)
K25 = MoonViTConfig(text_hidden_size=7168)


def pattern(height: int, width: int) -> RGBImage:
    y, x, c = np.indices((height, width, 3))
    pixels = ((y * 7 + x * 13 + c * 50 + (x * y) % 31 * 3) % 256).astype(np.uint8)
    return RGBImage(pixels, digest_of(pixels.tobytes()))


def sizes_in(name: str) -> tuple[int, int]:
    height, width = name.split("_")[1].split("x")
    return int(height), int(width)


@pytest.mark.parametrize(
    "name", [name.removesuffix("_tiles") for name in EXPECTED if name.endswith("_tiles")]
)
def test_llama4_tiles(name: str):
    processor = Llama4ImageProcessor(
        tile=12, tokens_per_tile=4, max_tiles=6, largest_canvas=name.endswith("_large")
    )
    made = processor(pattern(*sizes_in(name)))
    pixels, expected = made.item.pixel_values, EXPECTED[name].astype(np.float32)
    assert pixels.shape == expected.shape
    assert pixels.dtype == np.float32
    # PyTorch's resizing rounds its weights otherwise than Pillow's; bfloat16 then rounds what is one step apart.
    assert np.abs(pixels - expected).max() <= 1.5 * STEP
    assert (pixels != expected).mean() < 0.12
    rows, columns = EXPECTED[f"{name}_tiles"].tolist()
    assert made.tokens == processor.tokens(rows, columns)
    assert made.tokens.count("<|patch|>") == made.item.num_tokens == 4 * len(expected)


def test_llama4_values_are_the_reference_s_where_nothing_is_resized():
    made = Llama4ImageProcessor(tile=12, tokens_per_tile=4)(pattern(12, 12))
    np.testing.assert_array_equal(made.item.pixel_values, EXPECTED["llama4_12x12"].astype(np.float32))


def test_llama4_sizes():
    for height, width, largest, rows, columns, *fitted in EXPECTED["llama4_sizes"].tolist():
        processor = Llama4ImageProcessor(tile=336, tokens_per_tile=144, largest_canvas=bool(largest))
        canvas = processor.canvas(height, width)
        assert canvas == (rows, columns)
        assert processor.fitted((height, width), canvas) == tuple(fitted)


def test_llama4_layout_of_tokens():
    """As Llama4Processor writes them: rows of tiles with marks between, then the whole image."""
    tokens = Llama4ImageProcessor(tile=336, tokens_per_tile=2).tokens
    tile = "<|patch|><|patch|>"
    assert "".join(tokens(1, 1)) == f"<|image_start|><|image|>{tile}<|image_end|>"
    row = f"{tile}<|tile_x_separator|>{tile}<|tile_x_separator|>{tile}<|tile_y_separator|>"
    assert "".join(tokens(2, 3)) == f"<|image_start|>{row}{row}<|image|>{tile}<|image_end|>"
    assert "".join(tokens(2, 1)) == (
        f"<|image_start|>{tile}<|tile_y_separator|>{tile}<|tile_y_separator|><|image|>{tile}<|image_end|>"
    )


@pytest.mark.parametrize("name", [name.removesuffix("_grid") for name in EXPECTED if name.endswith("_grid")])
def test_kimi_patches(name: str):
    made = KimiImageProcessor(patch=4, max_patches=40, max_side=10)(pattern(*sizes_in(name)))
    assert made.item.grid_thw == tuple(EXPECTED[f"{name}_grid"].tolist())
    assert made.item.pixel_values.shape == EXPECTED[name].shape
    error = np.abs(made.item.pixel_values - EXPECTED[name])
    assert error.max() < 1.01 * STEP
    assert (error > 1e-6).mean() < 0.01
    assert made.tokens == ("<|media_pad|>",) * made.item.num_tokens
    assert made.item.num_tokens * 4 == len(EXPECTED[name])


def test_kimi_sizes():
    processor = KimiImageProcessor(patch=14)
    for height, width, *fitted, _, _ in EXPECTED["kimi_sizes"].tolist():
        assert processor.fitted(height, width) == tuple(fitted)


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.booleans())
def test_llama4_takes_images_of_any_shape(height: int, width: int, most: int, largest: bool):
    processor = Llama4ImageProcessor(tile=8, tokens_per_tile=4, max_tiles=most, largest_canvas=largest)
    made = processor(pattern(height, width))
    tiles = len(made.item.pixel_values)
    assert tiles == 1 or 3 <= tiles <= most + 1
    assert made.item.num_tokens == tiles * 4 == made.tokens.count("<|patch|>")
    assert np.abs(made.item.pixel_values).max() <= 1


@given(st.integers(1, 120), st.integers(1, 120))
def test_kimi_takes_images_of_any_shape(height: int, width: int):
    processor = KimiImageProcessor(patch=4, max_patches=48, max_side=12)
    made = processor(pattern(height, width))
    assert made.item.grid_thw is not None
    _, rows, columns = made.item.grid_thw
    assert rows % 2 == columns % 2 == 0
    assert max(rows, columns) <= 12
    # Padding and the cut-off parts of patches add less than two patches a side.
    assert (rows - 2) * (columns - 2) <= 48
    assert len(made.item.pixel_values) == rows * columns == made.item.num_tokens * 4


@pytest.mark.parametrize("shape", [(1, 1), (1, 40_000), (40_000, 1), (3, 20_000)])
def test_shapes_far_from_square(shape: tuple[int, int]):
    image = RGBImage(np.full((*shape, 3), 200, np.uint8), b"")
    assert len(Llama4ImageProcessor.from_hf({}, SCOUT)(image).item.pixel_values) in (1, 17)
    made = KimiImageProcessor.from_hf({}, K25)(image).item
    assert made.grid_thw is not None
    assert max(made.grid_thw) <= 512


def test_digests_cover_settings():
    image = pattern(9, 9)
    first = Llama4ImageProcessor(tile=12, tokens_per_tile=4)
    kimi = KimiImageProcessor(patch=4)
    others = [
        dataclasses.replace(first, max_tiles=4),
        dataclasses.replace(first, largest_canvas=True),
        dataclasses.replace(first, mean=(0.5, 0.5, 0.4)),
        kimi,
        dataclasses.replace(kimi, max_patches=99),
        dataclasses.replace(kimi, resample=2),
    ]
    digests = [processor(image).item.digest for processor in [first, *others]]
    assert len(set(digests)) == len(digests)
    assert first(pattern(9, 9)).item.digest == digests[0] != first(pattern(9, 10)).item.digest


def test_published_settings_in_each_style():
    llama4 = {
        "do_rescale": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_patches": 16,
        "resample": 2,
        "resize_to_max_canvas": False,
        "size": {"height": 336, "width": 336},
    }
    assert Llama4ImageProcessor.from_hf(llama4, SCOUT) == Llama4ImageProcessor.from_hf({}, SCOUT)
    release = {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
    }
    newer = {
        "max_patches": 16384,
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "size": {"max_height": 512, "max_width": 512},
    }
    plain = KimiImageProcessor.from_hf({}, K25)
    assert plain == KimiImageProcessor.from_hf({"media_proc_cfg": release}, K25)
    assert plain == KimiImageProcessor.from_hf(newer, K25)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama4", {"size": {"height": 448, "width": 448}}, "image_size=336"),
        ("llama4", {"max_patches": -1}, "max_patches"),
        ("kimi", {"patch_size": 16}, "patch_size=16"),
        ("kimi", {"merge_size": 4}, "merge_size=4"),
        ("kimi", {"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens"),
    ],
)
def test_settings_that_do_not_fit_the_tower(family: str, settings: dict[str, Any], words: str):
    def read() -> object:
        if family == "llama4":
            return Llama4ImageProcessor.from_hf(settings, SCOUT)
        return KimiImageProcessor.from_hf(settings, K25)

    with pytest.raises(ConfigError, match=words):
        read()


def test_placeholders_become_images_once():
    """An image's own tokens may hold the placeholder, as Llama 4's do."""
    expanded = expand_placeholders([1, 9, 2, 9, 3], 9, [[5, 9, 6], [7]])
    assert expanded == [1, 5, 9, 6, 2, 7, 3]
    assert expand_placeholders([1, 2], 9, []) == [1, 2]
    for ids, images in (([1, 9], []), ([1], [[5]]), ([9, 9], [[5]])):
        with pytest.raises(RequestError, match="places for images"):
            expand_placeholders(ids, 9, images)

"""Where the patches of images lie, worked out on the host: what MoonViT's program takes besides pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.config.vision import MoonViTConfig
from jaxinfer.errors import ConfigError

Grid = tuple[int, int, int]  # patches in time, down and across

TAPS = 4  # of a cubic kernel
_KEYS_A = -0.75  # Keys' cubic convolution as PyTorch has it; Pillow's is -0.5


class Layout(NamedTuple):
    """Where N patches lie, and which of them make rows. Arrays of the host, or a program's arguments.

    Attributes:
      places: row and column of each patch in its image.
      taps, weights: four rows, then four columns of the position table, and how much of each (bicubic interpolation).
      frames: 1 + which frame of a clip, or 0 in a still image.
      segments: which item a patch belongs to; attention stays inside.
      sources, shares: patches at one place in the frames of an item, and the weights that average them; R places follow
        each other in the order in which rows take them.
    """

    places: Any  # int32 [N, 2]
    taps: Any  # int32 [N, 2, 4]
    weights: Any  # float32 [N, 2, 4]
    frames: Any  # int32 [N]
    segments: Any  # int32 [N]
    sources: Any  # int32 [F, R]
    shares: Any  # float32 [F, R]


def make_layout(config: MoonViTConfig, grids: Sequence[Grid], num_patches: int | None = None) -> Layout:
    """The layout of media items whose patches follow each other: frame by frame, row by row.

    num_patches: padded to so many, which make num_patches / patches_per_row rows; those of the items come first.
    """
    items = [_item_layout(config, grid, i) for i, grid in enumerate(grids)]
    sizes = [item.segments.size for item in items]
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    depth = max(item.sources.shape[0] for item in items)
    items = [
        item._replace(sources=_deep(item.sources + start, depth), shares=_deep(item.shares, depth))
        for item, start in zip(items, starts, strict=True)
    ]
    *patches, sources, shares = zip(*items, strict=True)
    joined = [np.concatenate(x) for x in patches] + [np.concatenate(x, axis=1) for x in (sources, shares)]
    layout = Layout._make(joined)
    return layout if num_patches is None else _padded(layout, num_patches)


def _item_layout(config: MoonViTConfig, grid: Grid, number: int) -> Layout:
    time, height, width = grid
    down, across = config.merge
    if min(grid) < 1 or height % down or width % across:
        raise ConfigError(f"a grid of {grid} patches does not divide into {down} x {across} patches")
    if time > config.table[2]:
        raise ConfigError(f"{time} frames are more than the position table's {config.table[2]}")
    flat = np.indices(grid).reshape(3, -1)
    frame, row, column = flat
    row_taps, row_weights = cubic_taps(height, config.table[0])
    column_taps, column_weights = cubic_taps(width, config.table[1])
    order = np.arange(time * height * width).reshape(time, height // down, down, width // across, across)
    sources = order.transpose(0, 1, 3, 2, 4).reshape(time, -1)
    return Layout(
        places=np.stack([row, column], axis=1).astype(np.int32),
        taps=np.stack([row_taps[row], column_taps[column]], axis=1),
        weights=np.stack([row_weights[row], column_weights[column]], axis=1),
        frames=(frame + 1 if time > 1 else frame).astype(np.int32),
        segments=np.full(flat.shape[1], number, np.int32),
        sources=sources.astype(np.int32),
        shares=np.full(sources.shape, 1 / time, np.float32),
    )


def cubic_taps(size: int, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices int32 and weights float32, each [size, 4], that resample `table` values to `size` by cubic convolution.

    Pixel centres, no antialiasing, and the edge repeated, as PyTorch's interpolate(mode="bicubic").
    """
    at = (np.arange(size) + 0.5) * table / size - 0.5
    first = np.floor(at).astype(np.int32)[:, None] + np.arange(-1, TAPS - 1, dtype=np.int32)
    far, a = np.abs(at[:, None] - first), _KEYS_A
    inner = ((a + 2) * far - (a + 3)) * far**2 + 1
    outer = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return np.clip(first, 0, table - 1), np.where(far <= 1, inner, outer).astype(np.float32)


def _deep(x: np.ndarray, depth: int) -> np.ndarray:
    """More frames, which weigh nothing."""
    return np.pad(x, ((0, depth - x.shape[0]), (0, 0)))


def _padded(layout: Layout, num_patches: int) -> Layout:
    extra, places = num_patches - layout.segments.size, num_patches - layout.sources.shape[1]
    if extra < 0:
        raise ConfigError(f"{layout.segments.size} patches do not fit into {num_patches}")
    *others, segments = (np.pad(x, ((0, extra), *[(0, 0)] * (x.ndim - 1))) for x in layout[:5])
    segments[layout.segments.size :] = -1  # these see each other alone
    return Layout._make([*others, segments, *(np.pad(x, ((0, 0), (0, places))) for x in layout[5:])])

"""MoonViT, Kimi K2.5's vision tower (arXiv:2504.07491): images of any shape, as many patches as they have.

Everything that depends on the shapes of images is worked out on the host (`Layout`), so that one compiled program
can serve all images of up to so many patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.vision import MoonViTConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.rope import RopeTables
from jaxinfer.models.layers.vision import MLP, LayerNorm, Scene, VisionAttention, VisionBlock
from jaxinfer.models.params import declare
from jaxinfer.models.vision.layout import TAPS, Grid, Layout, make_layout
from jaxinfer.models.vision.tower import TowerBatch, VisionTower
from pallas_kernels.linear import linear

_SIZES = (256, 1024, 4096, 16384)  # patches
_TIME_THETA = 10000.0


class MoonViT(VisionTower):
    """Patches to rows of the language model's width; parameters are declared, see jaxinfer.models.params.

    Args:
      dtype: of the weights.
      compute_dtype: of what goes through the blocks; None: as the weights.
    """

    def __init__(self, config: MoonViTConfig, *, dtype: DTypeLike, compute_dtype: DTypeLike | None = None):
        c, name, width = config, "vision_tower", config.hidden_size
        self.config = c
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        self.patch_embed = PatchEmbedding(f"{name}.patch_embed.proj", c.patch_size, width, dtype=dtype)
        self.positions = declare(
            {f"{name}.patch_embed.pos_emb.weight": (*c.table[:2], width)},
            axes=(None, None, "embed"),
            dtype=dtype,
        )
        self.blocks = nnx.List([_block(f"{name}.encoder.blocks.{i}", c, dtype) for i in range(c.num_layers)])
        self.norm = LayerNorm(f"{name}.encoder.final_layernorm", width, dtype=dtype)
        self.projector_norm = LayerNorm("mm_projector.pre_norm", width, dtype=dtype, eps=c.projector_eps)
        merged = width * c.patches_per_row
        self.projector_in = Linear(
            {"mm_projector.proj.0": merged}, merged, axes=("ffn", "embed"), dtype=dtype, bias=True
        )
        self.projector_out = Linear(
            {"mm_projector.proj.2": c.text_hidden_size}, merged, axes=("embed", "ffn"), dtype=dtype, bias=True
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return _SIZES

    def shapes(self, size: int) -> tuple[jax.ShapeDtypeStruct, Layout]:
        patch = self.config.patch_size
        pixels, layout = self._arrays(
            np.empty((0, 3, patch, patch), np.float32), (1, *self.config.merge), size
        )
        pixels = jax.ShapeDtypeStruct((size, *pixels.shape[1:]), jnp.float32)
        return pixels, Layout(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layout))

    def num_rows(self, size: int) -> int:
        return size // self.config.patches_per_row

    def batches(self, pixel_values: np.ndarray, grid_thw: tuple[int, int, int] | None) -> list[TowerBatch]:
        assert grid_thw is not None
        fitting = [size for size in self.sizes if size >= len(pixel_values)]
        if not fitting:
            raise ConfigError(
                f"an image of {len(pixel_values)} patches is too large: {self.sizes[-1]} is the most"
            )
        rows = grid_thw[1] * grid_thw[2] // self.config.patches_per_row
        return [TowerBatch(fitting[0], self._arrays(pixel_values, grid_thw, fitting[0]), rows)]

    def _arrays(self, pixels: np.ndarray, grid: Grid, size: int) -> tuple[np.ndarray, Layout]:
        """Pixels and layout of one image, padded; clips and images share programs, so every layout is as deep as a clip's."""
        layout = make_layout(self.config, [grid], size)
        frames = self.config.table[2]
        deep = [np.pad(x, ((0, frames - len(x)), (0, 0))) for x in (layout.sources, layout.shares)]
        padded = np.pad(pixels.astype(np.float32, copy=False), ((0, size - len(pixels)), *[(0, 0)] * 3))
        return padded, layout._replace(sources=deep[0], shares=deep[1])

    def split(self, pixel_values: np.ndarray, grids: list[list[int]] | None) -> list[MediaItem]:
        sizes = [math.prod(grid) for grid in grids or ()]
        if sum(sizes) != len(pixel_values):
            raise RequestError(
                f"{len(pixel_values)} patches, but image_grid_thw {grids} asks for {sum(sizes)}",
                param="image_grid_thw",
            )
        starts = np.cumsum([0, *sizes])
        return [
            MediaItem(
                pixel_values[start : start + size],
                grid[1] * grid[2] // self.config.patches_per_row,
                b"",
                (grid[0], grid[1], grid[2]),
            )
            for grid, start, size in zip(grids or (), starts, sizes, strict=False)
        ]

    def rows(self, arrays: tuple[Array, Layout]) -> Float[Array, "rows D_text"]:
        return self.encode(*arrays)

    def __call__(
        self, pixel_values: Float[Array, "N 3 patch patch"], grid_thw: Sequence[Grid]
    ) -> Float[Array, "rows D_text"]:
        """t * h * w patches for each (t, h, w) give h * w / patches_per_row rows."""
        return self.encode(pixel_values, make_layout(self.config, grid_thw))

    def encode(
        self, pixel_values: Float[Array, "N 3 patch patch"], layout: Layout
    ) -> Float[Array, "rows D_text"]:
        """As a call, for a layout that may be an argument of the compiled program."""
        x = self.patch_embed(pixel_values.astype(self.compute_dtype))
        x = x + self._positions(layout).astype(x.dtype)
        scene = Scene(1, self._ropes(layout), jnp.asarray(layout.segments))
        for block in self.blocks:
            x = block(x, scene)
        x = self.norm(x)
        shares = jnp.asarray(layout.shares)[..., None]
        x = (x[layout.sources].astype(jnp.float32) * shares).sum(axis=0).astype(x.dtype)
        x = self.projector_norm(x).reshape(-1, self.config.patches_per_row * self.config.hidden_size)
        hidden = jax.nn.gelu(self.projector_in.wide(x), approximate=False).astype(x.dtype)
        return self.projector_out(hidden)

    def _positions(self, layout: Layout) -> Float[Array, "N D"]:
        """Learned positions, resampled to each image's shape, and a fixed one for each frame of a clip."""
        table = self.positions[...].astype(jnp.float32)
        taps, weights = jnp.asarray(layout.taps), jnp.asarray(layout.weights)
        total = jnp.asarray(frame_table(self.config))[layout.frames]
        for i in range(TAPS):  # one at a time: all sixteen of every patch are too much to hold
            for j in range(TAPS):
                weight = weights[:, 0, i] * weights[:, 1, j]
                total = total + weight[:, None] * table[taps[:, 0, i], taps[:, 1, j]]
        return total

    def _ropes(self, layout: Layout) -> RopeTables:
        """Pairs of dimensions turn by turns with the column and the row."""
        axis_dim = self.config.hidden_size // self.config.num_heads // 2
        speed = self.config.rope_theta ** -(np.arange(0, axis_dim, 2, dtype=np.float32) / axis_dim)
        places = jnp.asarray(layout.places)[:, ::-1].astype(jnp.float32)
        phases = (places[:, None, :] * speed[:, None]).reshape(places.shape[0], axis_dim)
        return jax.lax.optimization_barrier((jnp.cos(phases), jnp.sin(phases)))


class PatchEmbedding(nnx.Module):
    """A convolution whose step is its size, which is one product over the values of a patch."""

    def __init__(self, name: str, patch: int, width: int, *, dtype: DTypeLike):
        values = 3 * patch**2
        self.weight = declare(
            {f"{name}.weight": (width, 3, patch, patch)},
            axes=(None, "embed"),
            dtype=dtype,
            shape=(width, values),
        )
        self.bias = declare({f"{name}.bias": (width,)}, axes=(None,), dtype=dtype, init="zeros")

    def __call__(self, patches: Float[Array, "N 3 patch patch"]) -> Float[Array, "N D"]:
        flat = patches.reshape(patches.shape[0], -1)
        y = linear(flat, self.weight[...])
        return (y + self.bias[...].astype(jnp.float32)).astype(patches.dtype)


def frame_table(config: MoonViTConfig) -> np.ndarray:
    """Float32 [frames + 1, D]: sines and cosines of each frame's number; row 0, of still images, is zero."""
    speed = _TIME_THETA ** -(np.arange(0, config.hidden_size, 2, dtype=np.float32) / config.hidden_size)
    phases = np.arange(config.table[2], dtype=np.float32)[:, None] * speed
    return np.pad(np.concatenate([np.sin(phases), np.cos(phases)], axis=1), ((1, 0), (0, 0)))


def _block(name: str, config: MoonViTConfig, dtype: DTypeLike) -> VisionBlock:
    c = config
    norms = (
        LayerNorm(f"{name}.norm0", c.hidden_size, dtype=dtype),
        LayerNorm(f"{name}.norm1", c.hidden_size, dtype=dtype),
    )
    attention = VisionAttention((f"{name}.wqkv",), f"{name}.wo", c.hidden_size, c.num_heads, dtype=dtype)
    mlp = MLP(
        *(f"{name}.mlp.fc0", f"{name}.mlp.fc1"),
        c.hidden_size,
        c.intermediate_size,
        act=c.hidden_act,
        dtype=dtype,
    )
    return VisionBlock(norms, attention, mlp)

"""Llama 4's vision tower: tiles of one size through a transformer with a class token, then a pixel shuffle and an adapter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.vision import Llama4VisionConfig
from jaxinfer.media.item import MediaItem
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.vision import MLP, LayerNorm, Scene, VisionAttention, VisionBlock
from jaxinfer.models.params import declare
from jaxinfer.models.vision.tower import TowerBatch, VisionTower

_SIZES = (1, 4)  # tiles
_ACT = "gelu"  # the exact one, whatever hidden_act says


class Llama4Vision(VisionTower):
    """Tiles to rows of the language model's width; parameters are declared, see jaxinfer.models.params.

    Args:
      dtype: of the weights.
      compute_dtype: of what goes through the blocks; None: as the weights.
    """

    def __init__(
        self, config: Llama4VisionConfig, *, dtype: DTypeLike, compute_dtype: DTypeLike | None = None
    ):
        c, name, width = config, "vision_model", config.hidden_size
        self.config = c
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        plain = {"axes": (None, "embed"), "dtype": dtype}
        self.patch_embedding = Linear(
            {f"{name}.patch_embedding.linear": width}, c.num_channels * c.patch_size**2, **plain
        )
        self.class_embedding = declare({f"{name}.class_embedding": (width,)}, axes=(None,), dtype=dtype)
        self.positions = declare(
            {f"{name}.positional_embedding_vlm": (c.grid**2 + 1, width)}, axes=(None, "embed"), dtype=dtype
        )
        self.norm_before = LayerNorm(f"{name}.layernorm_pre", width, dtype=dtype)
        self.blocks = nnx.List([_block(f"{name}.model.layers.{i}", c, dtype) for i in range(c.num_layers)])
        self.norm_after = LayerNorm(f"{name}.layernorm_post", width, dtype=dtype)
        adapter = f"{name}.vision_adapter.mlp"
        self.adapter_in = Linear(
            {f"{adapter}.fc1": c.adapter_size}, c.intermediate_size, axes=("ffn", "embed"), dtype=dtype
        )
        self.adapter_out = Linear(
            {f"{adapter}.fc2": c.adapter_size}, c.adapter_size, axes=("embed", "ffn"), dtype=dtype
        )
        self.projector = Linear(
            {"multi_modal_projector.linear_1": c.text_hidden_size}, c.adapter_size, **plain
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return _SIZES

    def shapes(self, size: int) -> jax.ShapeDtypeStruct:
        c = self.config
        return jax.ShapeDtypeStruct((size, c.num_channels, c.image_size, c.image_size), jnp.float32)

    def num_rows(self, size: int) -> int:
        return size * self.config.tokens_per_tile

    def batches(self, pixel_values: np.ndarray, grid_thw: tuple[int, int, int] | None) -> list[TowerBatch]:
        tiles, found = pixel_values.astype(np.float32, copy=False), []
        while len(tiles):
            size = max(size for size in self.sizes if size <= len(tiles))
            found.append(TowerBatch(size, tiles[:size], self.num_rows(size)))
            tiles = tiles[size:]
        return found

    def split(self, pixel_values: np.ndarray, grids: list[list[int]] | None) -> list[MediaItem]:
        return [MediaItem(tile[None], self.config.tokens_per_tile, b"") for tile in pixel_values]

    def rows(self, arrays: Array) -> Float[Array, "rows D_text"]:
        return self(arrays)

    def __call__(
        self, pixel_values: Float[Array, "tiles channels size size"], grid_thw: None = None
    ) -> Float[Array, "rows D_text"]:
        """tokens_per_tile rows for each tile, in order."""
        c, tiles = self.config, pixel_values.shape[0]
        x = self.patch_embedding(self._patches(pixel_values).astype(self.compute_dtype))
        last = jnp.broadcast_to(self.class_embedding[...].astype(x.dtype), (tiles, 1, c.hidden_size))
        x = jnp.concatenate([x.reshape(tiles, -1, c.hidden_size), last], axis=1)
        x = x + self.positions[...].astype(x.dtype)
        x = self.norm_before(x.reshape(-1, c.hidden_size))
        phases = np.tile(rope_phases(c), (tiles, 1))
        scene = Scene(tiles, (jnp.asarray(np.cos(phases)), jnp.asarray(np.sin(phases))))
        for block in self.blocks:
            x = block(x, scene)
        x = self.norm_after(x).reshape(tiles, -1, c.hidden_size)[:, :-1]
        return self.projector(self._adapt(x))

    def _patches(
        self, pixels: Float[Array, "tiles channels size size"]
    ) -> Float[Array, "patches patch_values"]:
        c, tiles = self.config, pixels.shape[0]
        cut = pixels.reshape(tiles, c.num_channels, c.grid, c.patch_size, c.grid, c.patch_size)
        return cut.transpose(0, 2, 4, 1, 3, 5).reshape(tiles * c.grid**2, -1)

    def _adapt(self, x: Float[Array, "tiles patches D"]) -> Float[Array, "rows D_adapter"]:
        """Squares of patches become one row each (pixel shuffle), which an MLP narrows."""
        c, side = self.config, self.config.grid // self.config.shuffle
        squares = x.reshape(-1, side, c.shuffle, side, c.shuffle, c.hidden_size)
        rows = squares.transpose(0, 1, 3, 2, 4, 5).reshape(-1, c.intermediate_size)
        hidden = jax.nn.gelu(self.adapter_in.wide(rows), approximate=False).astype(rows.dtype)
        return jax.nn.gelu(self.adapter_out.wide(hidden), approximate=False).astype(rows.dtype)


def rope_phases(config: Llama4VisionConfig) -> np.ndarray:
    """Float32 [patches + 1, head_dim / 2]: the first half turns with the column, the second with the row, both from 1.

    The class token, which comes last, does not turn.
    """
    axis_dim = config.hidden_size // config.num_heads // 2
    speed = config.rope_theta ** -(np.arange(0, axis_dim, 2, dtype=np.float32) / axis_dim)
    rows, columns = (np.indices((config.grid, config.grid)) + 1).reshape(2, -1, 1)
    phases = np.concatenate([columns * speed, rows * speed], axis=1)
    return np.pad(phases, ((0, 1), (0, 0))).astype(np.float32)


def _block(name: str, config: Llama4VisionConfig, dtype: DTypeLike) -> VisionBlock:
    c = config
    before = LayerNorm(f"{name}.input_layernorm", c.hidden_size, dtype=dtype)
    between = LayerNorm(f"{name}.post_attention_layernorm", c.hidden_size, dtype=dtype)
    qkv = (f"{name}.self_attn.q_proj", f"{name}.self_attn.k_proj", f"{name}.self_attn.v_proj")
    attention = VisionAttention(qkv, f"{name}.self_attn.o_proj", c.hidden_size, c.num_heads, dtype=dtype)
    mlp = MLP(f"{name}.mlp.fc1", f"{name}.mlp.fc2", c.hidden_size, c.intermediate_size, act=_ACT, dtype=dtype)
    return VisionBlock((before, between), attention, mlp)

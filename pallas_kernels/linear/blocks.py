"""Weights that stay in the blocks of codes they are stored in: 4.5 to 9 bits each instead of 16 or 32, with the same values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

BLOCK = 32  # values that share a scale
BlockKind = Literal["int4", "int8"]


class BlockWeights(NamedTuple):
    """A matrix [N, K] in blocks of 32 codes along K.

    With uint8 codes two values share a byte and w = code * scale + offset (GGUF's Q4_0 and Q4_1): byte j of a block has value j in
    its low half and value 16 + j in its high half. With int8 codes w = code * scale (GGUF's Q8_0).

    Attributes:
      codes: [N, K / 2] uint8 or [N, K] int8.
      scales: [N, K / 32, 2] (scale, offset) or [N, K / 32, 1], float16.
    Both are JAX's arrays, NumPy's while a checkpoint is read, or shapes without values.
    """

    codes: Any
    scales: Any

    @classmethod
    def abstract(cls, kind: BlockKind, shape: tuple[int, int]) -> BlockWeights:
        """Shapes without values. K must be a multiple of 32."""
        n, k = shape
        if k % BLOCK:
            raise ValueError(f"rows of {k} values do not divide into blocks of {BLOCK}")
        width, dtype, scales = (k // 2, jnp.uint8, 2) if kind == "int4" else (k, jnp.int8, 1)
        return cls(
            jax.ShapeDtypeStruct((n, width), dtype),
            jax.ShapeDtypeStruct((n, k // BLOCK, scales), jnp.float16),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.scales.shape[1] * BLOCK

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "N K"]:
        """The values as a plain matrix, computed in float32."""
        blocks = self.codes.reshape(*self.scales.shape[:2], -1)
        scale = self.scales[..., :1].astype(jnp.float32)
        if self.codes.dtype == jnp.int8:
            values = blocks.astype(jnp.float32) * scale
        else:
            codes = jnp.concatenate([blocks & 15, blocks >> 4], axis=-1)
            values = codes.astype(jnp.float32) * scale + self.scales[..., 1:].astype(jnp.float32)
        return values.reshape(self.shape).astype(dtype)

    def rows(self, index: Int[Array, " T"]) -> Float[Array, "T K"]:
        """Some rows of the matrix, float32; an index out of range takes the nearest row."""
        taken = BlockWeights(*(part.at[index].get(mode="clip") for part in self))
        return taken.dense()

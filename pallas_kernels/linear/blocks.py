"""Weights that stay in the blocks of codes they are stored in: 4.5 to 9 bits each instead of 16 or 32, with the same values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

BLOCK = 32  # values that share a scale
BlockKind = Literal["int4", "int4_symmetric", "int8"]


class BlockWeights(NamedTuple):
    """Matrices [..., N, K] in blocks of 32 codes along K.

    | kind             | codes                  | scales                                          | value                 |
    |------------------|------------------------|-------------------------------------------------|-----------------------|
    | "int4"           | [..., N, K / 2] uint8  | [..., N, K / 32, 2] float16, a scale, an offset | code * scale + offset |
    | "int4_symmetric" | [..., N, K / 2] uint8  | [..., N, K / 32, 1] bfloat16                    | (code - 8) * scale    |
    | "int8"           | [..., N, K] int8       | [..., N, K / 32, 1] float16                     | code * scale          |

    The first holds GGUF's Q4_0 and Q4_1, the second compressed-tensors' "pack-quantized" INT4 (Kimi K2.5), the third GGUF's Q8_0.
    Codes of four bits, 0 to 15, share a byte: byte j of a block's 16 has value j in its low half and value 16 + j in its high half.

    Both are JAX's arrays, NumPy's while a checkpoint is read, or shapes without values.
    """

    codes: Any
    scales: Any

    @classmethod
    def abstract(cls, kind: BlockKind, shape: tuple[int, ...]) -> BlockWeights:
        """Shapes without values. K must be a multiple of 32."""
        *lead, k = shape
        if k % BLOCK:
            raise ValueError(f"rows of {k} values do not divide into blocks of {BLOCK}")
        width, dtype = (k, jnp.int8) if kind == "int8" else (k // 2, jnp.uint8)
        scale_dtype = jnp.bfloat16 if kind == "int4_symmetric" else jnp.float16
        return cls(
            jax.ShapeDtypeStruct((*lead, width), dtype),
            jax.ShapeDtypeStruct((*lead, k // BLOCK, 2 if kind == "int4" else 1), scale_dtype),
        )

    @property
    def kind(self) -> BlockKind:
        if self.codes.dtype == jnp.int8:
            return "int8"
        return "int4_symmetric" if self.scales.dtype == jnp.bfloat16 else "int4"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.scales.shape[-2] * BLOCK)

    def reshape(self, *shape: int) -> BlockWeights:
        """The same values with other leading axes; the last axis must stay as it is."""
        if shape[-1] != self.shape[-1]:
            raise ValueError(f"rows of {self.shape[-1]} values in blocks cannot become rows of {shape[-1]}")
        lead = shape[:-1]
        return BlockWeights(
            self.codes.reshape(*lead, self.codes.shape[-1]),
            self.scales.reshape(*lead, *self.scales.shape[-2:]),
        )

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "... N K"]:
        """The values as plain matrices, computed in float32."""
        blocks = self.codes.reshape(*self.scales.shape[:-1], -1)
        scale = self.scales[..., :1].astype(jnp.float32)
        if self.kind == "int8":
            values = blocks.astype(jnp.float32) * scale
        else:
            codes = jnp.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(jnp.float32)
            offset = self.scales[..., 1:].astype(jnp.float32) if self.kind == "int4" else -8 * scale
            values = codes * scale + offset
        return values.reshape(self.shape).astype(dtype)

    def rows(self, index: Int[Array, " T"]) -> Float[Array, "T K"]:
        """Some rows of one matrix, float32; an index out of range takes the nearest row."""
        taken = BlockWeights(*(part.at[index].get(mode="clip") for part in self))
        return taken.dense()

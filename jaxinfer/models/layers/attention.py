"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch, write_kv
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.rope import apply_rope
from pallas_kernels.paged_attention import paged_attention

RopeTables = tuple[Float[Array, "T half"], Float[Array, "T half"]]


class Attention(nnx.Module):
    """Self-attention of one layer (GQA, arXiv:2305.13245); reads and writes the layer's pages of `group`."""

    def __init__(self, name: str, config: ModelConfig, *, group: int, window: int | None, dtype: DTypeLike):
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.group = group
        self.window = window
        self.qkv = Linear(
            {
                f"{name}.q_proj": c.num_heads * c.head_dim,
                f"{name}.k_proj": c.num_kv_heads * c.head_dim,
                f"{name}.v_proj": c.num_kv_heads * c.head_dim,
            },
            c.hidden_size,
            axes=("heads", "embed"),
            dtype=dtype,
            bias=c.attention_bias,
        )
        self.out = Linear(
            {f"{name}.o_proj": c.hidden_size},
            c.num_heads * c.head_dim,
            axes=("embed", "heads"),
            dtype=dtype,
            bias=c.attention_out_bias,
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: RopeTables,
        batch: StepBatch,
        pages: Float[Array, "2 KV P page hd"],
    ) -> tuple[Float[Array, "T D"], Float[Array, "2 KV P page hd"]]:
        q, k, v = jnp.split(
            self.qkv(x).reshape(x.shape[0], -1, self.head_dim),
            [self.heads, self.heads + self.kv_heads],
            axis=1,
        )
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        pages = write_kv(pages, k, v, batch, self.group)
        mixed = attend(q, pages, batch, self.group, scale=self.head_dim**-0.5, window=self.window)
        return self.out(mixed.reshape(x.shape[0], -1)), pages


def attend(
    q: Float[Array, "T H hd"],
    pages: Float[Array, "2 KV P page hd"],
    batch: StepBatch,
    group: int,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
) -> Float[Array, "T H hd"]:
    """Attention of a step's flat queries: the decode rows together, then the prefill blocks together."""
    n, tables = batch.num_decode, batch.tables[group]
    sections = [
        (slice(0, n), 1),
        (slice(n, None), batch.block),
    ]  # rows follow tokens: n rows of one, then blocks
    parts: list[jax.Array] = []
    for span, queries in sections:
        part = q[span]
        if part.shape[0]:
            result = paged_attention(
                part.reshape(-1, queries, *part.shape[1:]),
                pages,
                tables[span],
                batch.positions[span][::queries],
                batch.kv_lens[span],
                scale=scale,
                window=window,
                chunk=chunk,
            )
            parts.append(result.reshape(part.shape))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import typing
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch, write_kv
from jaxinfer.kv.pages import LayerPlace, PageGroup
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.norm import RMSNorm
from jaxinfer.models.layers.rope import apply_rope
from jaxinfer.parallel.collectives import part_index, parts
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rms_norm import rms_norm

if typing.TYPE_CHECKING:
    from jaxinfer.models.decoder import Step

Pages = Float[Array, "2 KV P page hd"]
Heads = Float[Array, "T _ hd"]


class Attention(nnx.Module):
    """Self-attention of layer `index` (GQA, arXiv:2305.13245), with every turn that `ModelConfig` knows.

    norm_offset: the learned norms of queries and keys multiply by offset + weight.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        index: int,
        place: LayerPlace,
        *,
        dtype: DTypeLike,
        norm_offset: float = 0.0,
    ):
        c = config
        self.config = c
        self.place = place
        local = c.local_rope is not None and place.look.kind == "sliding"
        self.rope: Literal["local", "global"] | None = "local" if local else "global"
        if index in c.unrotated:
            self.rope = None
        widths = {f"{name}.{x}_proj": n * c.head_dim for x, n in zip("qkv", self._heads(), strict=True)}
        options = {"dtype": dtype, "bias": c.attention_bias}
        if parts("heads") <= c.num_kv_heads:
            groups = c.num_kv_heads
            self.qkv = Linear(widths, c.hidden_size, axes=("heads", "embed"), groups=groups, **options)
            self.q = self.kv = None
        else:  # several devices share a key head, and each needs it
            self.qkv = None
            q_name, *kv_names = widths
            kv_widths = {x: widths[x] for x in kv_names}
            self.q = Linear({q_name: widths[q_name]}, c.hidden_size, axes=("heads", "embed"), **options)
            self.kv = Linear(kv_widths, c.hidden_size, axes=(None, "embed"), **options)
        self.out = Linear(
            {f"{name}.o_proj": c.hidden_size},
            c.num_heads * c.head_dim,
            axes=("embed", "heads"),
            dtype=dtype,
            bias=c.attention_out_bias,
        )
        norms = [
            RMSNorm(f"{name}.{x}_norm", c.head_dim, eps=c.rms_norm_eps, dtype=dtype, offset=norm_offset)
            if c.qk_norm == "learned"
            else None
            for x in "qk"
        ]
        self.q_norm, self.k_norm = norms

    def __call__(self, x: Float[Array, "T D"], step: Step, pages: Pages) -> tuple[Float[Array, "T D"], Pages]:
        c = self.config
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            tables = step.ropes[self.rope]
            q, k = (apply_rope(y, tables, interleaved=c.rope.interleaved) for y in (q, k))
            if c.qk_norm == "plain":
                ones = jnp.ones(c.head_dim, jnp.float32)
                q, k = (rms_norm(y, ones, eps=c.rms_norm_eps) for y in (q, k))
        elif c.temperature_scale:
            q = q * self._temperature(step.batch.positions).astype(q.dtype)
        pages = write_kv(pages, (k, v), step.batch, self.place.group)
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        mixed = attend(
            q,
            pages,
            step.batch,
            self.place.group,
            scale=scale,
            look=self.place.look,
            softcap=c.attention_softcap,
        )
        return self.out(mixed.reshape(x.shape[0], -1)), pages

    def _heads(self) -> tuple[int, int, int]:
        c = self.config
        return c.num_heads, c.num_kv_heads, c.num_kv_heads

    def _project(self, x: Float[Array, "T D"]) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values of this device's heads."""
        c = self.config
        per_key = c.num_heads // c.num_kv_heads
        if self.qkv is not None:
            y = self.qkv(x).reshape(x.shape[0], -1, per_key + 2, c.head_dim)
            q = y[:, :, :per_key].reshape(x.shape[0], -1, c.head_dim)
            return q, y[:, :, per_key], y[:, :, per_key + 1]
        assert self.q is not None
        assert self.kv is not None
        q = self.q(x).reshape(x.shape[0], -1, c.head_dim)
        kv = self.kv(x).reshape(x.shape[0], 2 * c.num_kv_heads, c.head_dim)
        own = part_index("heads") // (parts("heads") // c.num_kv_heads)
        k, v = (jax.lax.dynamic_slice_in_dim(kv, start + own, 1, axis=1) for start in (0, c.num_kv_heads))
        return q, k, v

    def _temperature(self, positions: Int[Array, " T"]) -> Float[Array, "T 1 1"]:
        """Sharpens far queries of layers that do not know positions (Llama 4's release)."""
        c = self.config
        steps = jnp.floor((positions.astype(jnp.float32) + 1) / c.temperature_floor)
        return (1 + c.temperature_scale * jnp.log1p(steps))[:, None, None]


def attend(
    q: Float[Array, "T H hd"],
    pages: Pages,
    batch: StepBatch,
    group: int,
    *,
    scale: float,
    look: PageGroup,
    softcap: float | None = None,
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
                window=look.span if look.kind == "sliding" else None,
                chunk=look.span if look.kind == "chunked" else None,
                softcap=softcap,
            )
            parts.append(result.reshape(part.shape))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

"""Multi-head latent attention over a paged cache of latents."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch, write_kv
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.layers.lanes import heads_to_lanes, lanes_to_heads, own_lane, own_tokens
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.norm import RMSNorm
from jaxinfer.models.layers.rope import apply_rope
from jaxinfer.models.params import declare
from pallas_kernels.mla_attention import latent_attention, mla_attention

if typing.TYPE_CHECKING:
    from jaxinfer.models.decoder import Step

Pages = Float[Array, "1 1 P page L"]

_NORM_EPS = 1e-6  # of the latents' norms: the code the models were released with does not take the config's


class MLA(nnx.Module):
    """Self-attention whose keys and values are made from one latent a token (MLA, arXiv:2405.04434).

    Devices split the heads, and each makes all latents. It keeps them all, or, of a step with lanes, those of its own lane's
    tokens: queries then go to the devices that have what they look at, and what they find comes back.
    """

    def __init__(self, name: str, config: ModelConfig, place: LayerPlace, *, dtype: DTypeLike):
        c, m = config, config.mla
        if m is None:
            raise ValueError("the config has no MLAConfig")
        self.config = m
        self.place = place
        self.interleaved = c.rope.interleaved
        head_dim = m.nope_dim + m.rope_dim
        self.scale = head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        latents = {f"{name}.kv_a_proj_with_mqa": m.latent_dim}
        if m.q_rank is None:
            q_name, q_width, q_axis = f"{name}.q_proj", c.hidden_size, "embed"
            self.q_norm = None
        else:
            q_name, q_width, q_axis = f"{name}.q_b_proj", m.q_rank, None
            latents = {f"{name}.q_a_proj": m.q_rank} | latents
            self.q_norm = RMSNorm(f"{name}.q_a_layernorm", m.q_rank, eps=_NORM_EPS, dtype=dtype)
        bias = c.attention_bias
        self.down = Linear(latents, c.hidden_size, axes=(None, "embed"), dtype=dtype, bias=bias)
        self.q = Linear({q_name: c.num_heads * head_dim}, q_width, axes=("heads", q_axis), dtype=dtype)
        self.kv_norm = RMSNorm(f"{name}.kv_a_layernorm", m.kv_rank, eps=_NORM_EPS, dtype=dtype)
        out = m.nope_dim + m.value_dim
        self.kv_b = declare(
            {f"{name}.kv_b_proj.weight": (c.num_heads * out, m.kv_rank)},
            axes=("heads", None, None),
            dtype=dtype,
            shape=(c.num_heads, out, m.kv_rank),
        )
        width = c.num_heads * m.value_dim
        self.out = Linear(
            {f"{name}.o_proj": c.hidden_size}, width, axes=("embed", "heads"), dtype=dtype, bias=bias
        )

    def __call__(self, x: Float[Array, "T D"], step: Step, pages: Pages) -> tuple[Float[Array, "T D"], Pages]:
        m, tables = self.config, step.ropes["global"]
        down = self.down(x)
        low, latent = down[:, : -m.latent_dim], down[:, -m.latent_dim :]
        q = self.q(x if self.q_norm is None else self.q_norm(low))
        q = q.reshape(x.shape[0], -1, m.nope_dim + m.rope_dim)
        q_rope = apply_rope(q[..., m.nope_dim :], tables, interleaved=self.interleaved)
        q = jnp.concatenate([q[..., : m.nope_dim], q_rope], axis=-1)
        key = apply_rope(latent[:, None, m.kv_rank :], tables, interleaved=self.interleaved)
        row = jnp.concatenate([self.kv_norm(latent[:, None, : m.kv_rank]), key], axis=-1)
        batch = step.batch
        if batch.lanes > 1:
            mixed, pages = self._attend_in_lanes(q, row, pages, batch)
        else:
            pages = write_kv(pages, (row,), batch, self.place.group)
            mixed = self._attend(mla_attention, q, pages, batch, self.kv_b[...])
        return self.out(mixed.reshape(x.shape[0], -1)), pages

    def _attend_in_lanes(
        self, q: Float[Array, "T h d"], row: Float[Array, "T 1 L"], pages: Pages, batch: StepBatch
    ) -> tuple[Float[Array, "T h v"], Pages]:
        """Attention over this device's pages, in the absorbed form, which needs no head's part of kv_b in between."""
        m, own = self.config, own_lane(batch)
        kv_b = self.kv_b[...].astype(q.dtype)
        q_latent = jnp.einsum("thn,hnl->thl", q[..., : m.nope_dim], kv_b[:, : m.nope_dim])
        q_latent = heads_to_lanes(jnp.concatenate([q_latent, q[..., m.nope_dim :]], axis=-1), batch)
        pages = write_kv(pages, (own_tokens(row, batch),), own, self.place.group)
        attend = functools.partial(latent_attention, rank=m.kv_rank)
        mixed = lanes_to_heads(self._attend(attend, q_latent, pages, own), batch)
        return jnp.einsum("thl,hvl->thv", mixed, kv_b[:, m.nope_dim :]), pages

    def _attend(
        self,
        attend: Callable[..., jax.Array],
        q: Float[Array, "T H d"],
        pages: Pages,
        batch: StepBatch,
        *more: jax.Array,
    ) -> Float[Array, "T H v"]:
        """The decode rows together, then the prefill blocks together."""
        n, tables = batch.num_decode, batch.tables[self.place.group]
        parts: list[jax.Array] = []
        for span, queries in ((slice(0, n), 1), (slice(n, None), batch.block)):
            part = q[span]
            if part.shape[0]:
                result = attend(
                    part.reshape(-1, queries, *part.shape[1:]),
                    pages,
                    tables[span],
                    batch.positions[span][::queries],
                    batch.kv_lens[span],
                    *more,
                    scale=self.scale,
                )
                parts.append(result.reshape(*part.shape[:2], -1))
        return jnp.concatenate(parts)

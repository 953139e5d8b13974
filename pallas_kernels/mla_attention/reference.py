"""Latent attention in plain XLA: a loop over blocks of pages with an online softmax, as in paged_attention/reference.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.zeros import zeros_with

_TURN_TOKENS = 256  # positions in one turn of the loop
_TURN_VALUES = 1 << 21  # and of a row's keys and values that a turn makes, at most so many

Mix = Callable[[jax.Array], jax.Array]  # weights [R, H, Q, t] -> mixed values [R, H, Q, v]
Look = Callable[[jax.Array], tuple[jax.Array, Mix]]  # latents [R, t, L] -> scores [R, H, Q, t] and what mixes


def absorbed_reference(
    q: Float[Array, "R Q H d"],
    pages: Float[Array, "1 1 P page L"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    kv_b: Float[Array, "H out rank"],
    *,
    scale: float,
) -> Float[Array, "R Q H v"]:
    """Queries meet the latents themselves: kv_b's key part is multiplied into them, its value part with what they mix."""
    q_nope, q_rope, b_key, b_value = _parts(q, pages, kv_b, scale)
    rank = kv_b.shape[2]
    q_latent = jnp.concatenate([jnp.einsum("rqhn,hnl->rhql", q_nope, b_key), q_rope.swapaxes(1, 2)], axis=-1)
    mixed = _mix_latents(q_latent, pages, tables, q_start, kv_lens, rank)
    return jnp.einsum("rhql,hvl->rqhv", mixed, b_value).astype(q.dtype)


def latent_attention(
    q_latent: Float[Array, "R Q H L"],
    pages: Float[Array, "1 1 P page L"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    *,
    rank: int,
    scale: float,
) -> Float[Array, "R Q H rank"]:
    """The middle of the absorbed form: queries that kv_b is multiplied into already, and what they mix, still latent.

    Arguments are those of `mla_attention`; rank: the part of a row of `pages` without the rotated key.
    """
    scaled = q_latent.astype(jnp.float32).swapaxes(1, 2) * scale
    mixed = _mix_latents(scaled, pages, tables, q_start, kv_lens, rank)
    return mixed.swapaxes(1, 2).astype(q_latent.dtype)


def _mix_latents(
    q_latent: Float[Array, "R H Q L"],
    pages: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_lens: jax.Array,
    rank: int,
) -> Float[Array, "R H Q rank"]:
    stats = q_latent.shape[:3]
    q_latent, zeros = zeros_with(q_latent, stats, (*stats, rank))

    def look(latents: jax.Array) -> tuple[jax.Array, Mix]:
        scores = jnp.einsum("rhql,rtl->rhqt", q_latent, latents)
        return scores, lambda weights: jnp.einsum("rhqt,rtl->rhql", weights, latents[..., :rank])

    return _attend(look, zeros, _TURN_TOKENS, pages, tables, q_start, kv_lens)


def expanded_reference(
    q: Float[Array, "R Q H d"],
    pages: Float[Array, "1 1 P page L"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    kv_b: Float[Array, "H out rank"],
    *,
    scale: float,
) -> Float[Array, "R Q H v"]:
    """Each turn makes the keys and values of its positions from their latents."""
    q_nope, q_rope, b_key, b_value = _parts(q, pages, kv_b, scale)
    heads, out, rank = kv_b.shape
    q_nope, q_rope = q_nope.swapaxes(1, 2), q_rope.swapaxes(1, 2)
    stats = q_nope.shape[:3]
    q_nope, zeros = zeros_with(q_nope, stats, (*stats, b_value.shape[1]))

    def look(latents: jax.Array) -> tuple[jax.Array, Mix]:
        keys = jnp.einsum("rtl,hnl->rhtn", latents[..., :rank], b_key)
        values = jnp.einsum("rtl,hvl->rhtv", latents[..., :rank], b_value)
        scores = jnp.einsum("rhqn,rhtn->rhqt", q_nope, keys)
        scores = scores + jnp.einsum("rhqp,rtp->rhqt", q_rope, latents[..., rank:])
        return scores, lambda weights: jnp.einsum("rhqt,rhtv->rhqv", weights, values)

    turn = min(_TURN_TOKENS, _TURN_VALUES // (heads * out))
    mixed = _attend(look, zeros, turn, pages, tables, q_start, kv_lens)
    return mixed.swapaxes(1, 2).astype(q.dtype)


def _parts(
    q: jax.Array, pages: jax.Array, kv_b: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The scaled queries and the expansion, each in two parts, float32: those without and with rotation, for keys and values."""
    nope = q.shape[-1] - (pages.shape[-1] - kv_b.shape[2])
    q, kv_b = q.astype(jnp.float32) * scale, kv_b.astype(jnp.float32)
    return q[..., :nope], q[..., nope:], kv_b[:, :nope], kv_b[:, nope:]


def _attend(
    look: Look,
    zeros: Sequence[jax.Array],
    turn_tokens: int,
    pages: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_lens: jax.Array,
) -> Float[Array, "R H Q v"]:
    """What the queries of each row mix from the positions they see. zeros: [R, H, Q] and [R, H, Q, v]."""
    total, out = zeros
    rows, _, queries, _ = out.shape
    page, width = pages.shape[3:]
    turn_pages = min(max(turn_tokens // page, 1), tables.shape[1])
    turn = turn_pages * page
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % turn_pages)))
    q_pos = q_start[:, None] + jnp.arange(queries)

    def body(i, carry):
        peak, total, out = carry
        k_pos = i * turn + jnp.arange(turn)
        seen = (k_pos < kv_lens[:, None])[:, None] & (k_pos <= q_pos[..., None])  # [R, Q, turn]
        index = jax.lax.dynamic_slice_in_dim(tables, i * turn_pages, turn_pages, axis=1)
        latents = pages[0, 0].at[index].get(mode="promise_in_bounds").reshape(rows, turn, width)
        # What no query sees may be NaN, and 0 * NaN is NaN: clear it while it is being gathered.
        latents = jnp.where(seen.any(axis=1)[..., None], latents, 0).astype(jnp.float32)
        scores, mix = look(latents)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # a row that sees nothing
        weights = jnp.exp(scores - safe_peak[..., None])
        shrink = jnp.exp(peak - safe_peak)
        return (
            new_peak,
            total * shrink + weights.sum(axis=-1),
            out * shrink[..., None] + mix(weights),
        )

    carry = (jnp.full(total.shape, -jnp.inf), total, out)
    if tables.shape[1] == turn_pages:
        carry = body(0, carry)
    else:
        carry = jax.lax.fori_loop(0, -(-jnp.max(kv_lens) // turn), body, carry)
    _, total, out = carry
    return out / jnp.where(total == 0, 1.0, total)[..., None]

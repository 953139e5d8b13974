"""Paged attention in plain XLA: a loop over blocks of pages with an online softmax (arXiv:2205.14135, without the tiles).

The trip count is the longest context of the batch, known on the device only, so short batches read little
although the page tables are as wide as the longest context allowed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.zeros import zeros_with

_BLOCK_TOKENS = 256  # keys in one turn of the loop


def paged_attention_reference(
    q: Float[Array, "R Q H hd"],
    kv_pages: Float[Array, "2 KV P page hd"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R Q H hd"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    rows, queries, heads, hd = q.shape
    _, kv_heads, _, page, _ = kv_pages.shape
    group = heads // kv_heads
    turn_pages = min(max(_BLOCK_TOKENS // page, 1), tables.shape[1])
    turn = turn_pages * page
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % turn_pages)))

    # [KV, R, G * Q, hd]: batch dimensions lead, and the products have G * Q rows.
    qs = q.reshape(rows, queries, kv_heads, group, hd).transpose(2, 0, 3, 1, 4).astype(jnp.float32) * scale
    qs = qs.reshape(kv_heads, rows, group * queries, hd)
    q_pos = q_start[:, None] + jnp.arange(queries)

    def visible(first: jax.Array | int) -> tuple[Bool[Array, "R Q turn"], Bool[Array, "R turn"]]:
        k_pos = first + jnp.arange(turn)
        exists = k_pos[None, :] < kv_lens[:, None]
        seen = exists[:, None, :] & (k_pos <= q_pos[..., None])
        if window is not None:
            seen &= k_pos > q_pos[..., None] - window
        if chunk is not None:
            seen &= k_pos >= (q_pos // chunk * chunk)[..., None]
        return seen, exists & seen.any(axis=1)

    def body(i, carry):
        peak, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(tables, i * turn_pages, turn_pages, axis=1)
        seen, read = visible(i * turn)
        kv = kv_pages.at[:, :, pages].get(mode="promise_in_bounds").reshape(2, kv_heads, rows, turn, hd)
        # What no query sees may be NaN, and 0 * NaN is NaN: clear it while it is being gathered.
        kv = jnp.where(read[None, None, :, :, None], kv, 0).astype(jnp.float32)
        scores = jnp.einsum("krqd,krtd->krqt", qs, kv[0]).reshape(kv_heads, rows, group, queries, turn)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[None, :, None], scores, -jnp.inf).reshape(
            kv_heads, rows, group * queries, turn
        )
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # a row that sees nothing yet
        weights = jnp.exp(scores - safe_peak[..., None])
        shrink = jnp.exp(peak - safe_peak)
        total = total * shrink + weights.sum(axis=-1)
        out = out * shrink[..., None] + jnp.einsum("krqt,krtd->krqd", weights, kv[1])
        return new_peak, total, out

    stats = (kv_heads, rows, group * queries)
    qs, (total, out) = zeros_with(qs, stats, (*stats, hd))
    carry = (jnp.full(stats, -jnp.inf), total, out)
    if sinks is not None:  # a score without a value: it starts the sum
        peaks = sinks.astype(jnp.float32).reshape(kv_heads, 1, group, 1)
        peaks = jnp.broadcast_to(peaks, (kv_heads, rows, group, queries)).reshape(stats)
        carry = (peaks, jnp.ones(stats), carry[2])
    if tables.shape[1] == turn_pages:
        carry = body(0, carry)
    else:
        reach = jnp.zeros_like(q_start)  # the first position each row can see
        if window is not None:
            reach = jnp.maximum(reach, q_start - window + 1)
        if chunk is not None:
            reach = jnp.maximum(reach, q_start // chunk * chunk)
        first = jnp.min(jnp.where(kv_lens > 0, reach, jnp.iinfo(jnp.int32).max)) // turn
        last = -(-jnp.max(kv_lens) // turn)
        carry = jax.lax.fori_loop(first, last, body, carry)
    _, total, out = carry
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    out = out.reshape(kv_heads, rows, group, queries, hd).transpose(1, 3, 0, 2, 4)
    return out.reshape(rows, queries, heads, hd).astype(q.dtype)

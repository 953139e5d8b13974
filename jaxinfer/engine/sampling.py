"""Sampling on the device: from logits to tokens, one independent row a sequence.

A row's result depends on its logits, its parameters, its seed and its position alone, never on the rows beside it.
Nothing sorts the vocabulary: top-k and top-p find their threshold by bisection, and the draw inverts the
cumulative distribution in two levels with a single uniform number a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_TOP_LOGPROBS = 20
_DRAW_BLOCK = 128
_BISECTIONS = 32  # enough to tell any two float32 apart


class RowParams(NamedTuple):
    """Sampling parameters of S rows. A row whose temperature is 0 is greedy; slot is its row in the sampler's state."""

    slot: Int[Array, " S"]
    top_k: Int[Array, " S"]  # 0: off
    seed: Int[Array, "S 2"]  # 64 bits, low word first
    position: Int[Array, " S"]  # of the token to be drawn
    temperature: Float[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    presence_penalty: Float[Array, " S"]
    frequency_penalty: Float[Array, " S"]
    repetition_penalty: Float[Array, " S"]


class SamplerState(NamedTuple):
    """What penalties, biases and grammars need to know about each slot, kept on the device.

    Attributes:
      counts: 2 * (times generated) + (1 if it is in the prompt), for every token.
      bias: added to the logits; -inf forbids.
      allowed: bits of the tokens that a grammar allows, token i in bit i % 32 of word i // 32; all ones without a grammar.
    """

    counts: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    allowed: Int[Array, "slots words"]


class Logprobs(NamedTuple):
    """Natural-log probabilities under the model itself: before penalties, biases and temperature (as vLLM's default)."""

    chosen: Float[Array, "*rows"]
    top: Float[Array, "*rows top"]
    top_ids: Int[Array, "*rows top"]


def sample(
    logits: Float[Array, "S V"], rows: RowParams, state: SamplerState | None = None
) -> tuple[Int[Array, " S"], SamplerState | None]:
    """One token a row, or -1 where the logits hold a NaN or biases forbid every token.

    With a state, penalties and biases apply, and the token is counted.
    """
    if state is not None:
        logits = apply_penalties(logits, rows, state)
    peak = logits.max(axis=-1)  # passes NaN on
    bad = jnp.isnan(peak) | (peak == -jnp.inf)
    token = first_argmax(logits)
    sampled = rows.temperature > 0
    drawn = jax.lax.cond(jnp.any(sampled), lambda: draw(logits, rows), lambda: token)
    token = jnp.where(sampled, drawn, token)
    if state is not None:
        counts = state.counts.at[rows.slot, token].add(2)
        state = state._replace(counts=counts)
    return jnp.where(bad, -1, token), state


def first_argmax(logits: Float[Array, "S V"]) -> Int[Array, " S"]:
    """Index of the largest value, the first of equals. Two plain reductions are faster than argmax's paired one."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    best = logits.max(axis=-1, keepdims=True)
    index = jnp.where(logits == best, ids, logits.shape[1]).min(axis=-1)
    return jnp.minimum(index, logits.shape[1] - 1)  # a row of NaN equals nothing


def apply_penalties(logits: Float[Array, "S V"], rows: RowParams, state: SamplerState) -> Float[Array, "S V"]:
    """Repetition penalty over prompt and output (arXiv:1909.05858), presence and frequency over output, then biases, then grammars."""
    counts = state.counts[rows.slot]
    generated = (counts >> 1).astype(jnp.float32)
    penalty = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(counts > 0, repeated, logits)
    logits -= rows.frequency_penalty[:, None] * generated
    logits -= rows.presence_penalty[:, None] * (generated > 0)
    logits += state.bias[rows.slot]
    bits = state.allowed[rows.slot][:, :, None] >> jnp.arange(32) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def draw(logits: Float[Array, "S V"], rows: RowParams) -> Int[Array, " S"]:
    """A token from each row's distribution after temperature, top-k, top-p and min-p, in that order."""
    temperature = jnp.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
    # The most likely token weighs exactly 1, whatever the temperature does to the others.
    weights = jnp.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)

    def narrow(weights: Float[Array, "S V"]) -> Float[Array, "S V"]:
        enough = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[1])
        floor = _threshold(weights, lambda kept: kept.sum(axis=-1) >= enough)
        weights = jnp.where(weights >= floor[:, None], weights, 0.0)
        # A little slack: the sums of a row's tail and of its head round differently.
        mass = rows.top_p * weights.sum(axis=-1) * (1 - 1e-6)
        floor = _threshold(weights, lambda kept: jnp.where(kept, weights, 0.0).sum(axis=-1) >= mass)
        floor = jnp.where(rows.top_p < 1, floor, 0.0)
        floor = jnp.maximum(floor, rows.min_p)
        return jnp.where(weights >= floor[:, None], weights, 0.0)

    narrows = jnp.any((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    weights = jax.lax.cond(narrows, narrow, lambda w: w, weights)
    return _invert_cdf(weights, _uniforms(rows))


def _threshold(weights: Float[Array, "S V"], enough) -> Float[Array, " S"]:
    """Largest t of each row such that `enough(weights >= t)` holds, by bisection over the bits of t in (0, 1].

    Positive floats order like their bits. `enough` must hold for t = 0; ties at t are all kept.
    """

    def halve(_, bounds):
        low, high = bounds  # enough at low, not at high
        middle = low + (high - low) // 2
        fits = enough(weights >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None])
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    rows = weights.shape[:1]
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, one + 1)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _uniforms(rows: RowParams) -> Float[Array, " S"]:
    """One number in [0, 1) a row, from its seed and position alone."""

    def one(seed: Int[Array, 2], position: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1])
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(rows.seed, rows.position)


def _invert_cdf(weights: Float[Array, "S V"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """First token at which the running sum of its row's weights exceeds u times their total."""
    count, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _DRAW_BLOCK))).reshape(count, -1, _DRAW_BLOCK)
    ends = jnp.cumsum(blocks.sum(axis=-1), axis=-1)  # [S, blocks]
    target = u * ends[:, -1]
    block = _first_above(ends, target)
    before = jnp.where(
        block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, block]
    offset = _first_above(jnp.cumsum(inside, axis=-1), target - before)
    # Rounding may step past the block's last weight onto a token of no weight: fall back to its heaviest.
    chosen = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
    return block * _DRAW_BLOCK + jnp.where(chosen > 0, offset, first_argmax(inside))


def _first_above(ends: Float[Array, "S n"], target: Float[Array, " S"]) -> Int[Array, " S"]:
    above: Bool[Array, "S n"] = ends > target[:, None]
    index = jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
    return jnp.where(above, index, ends.shape[1] - 1).min(axis=-1)


def logprobs_of(logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Logprobs:
    """Log-probability of the given tokens and the most likely ones of each row."""
    log_total = jax.nn.logsumexp(logits, axis=-1)
    ids = jnp.maximum(tokens, 0)[:, None]
    chosen = jnp.take_along_axis(logits, ids, axis=1)[:, 0] - log_total
    top, top_ids = jax.lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    return Logprobs(chosen=chosen, top=top - log_total[:, None], top_ids=top_ids.astype(jnp.int32))

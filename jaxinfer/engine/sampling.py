"""Sampling on the device: from logits to tokens, one independent row a sequence.

A row's result depends on its logits, its parameters, its seed and its position alone, never on the rows beside it.
Nothing sorts the vocabulary: top-k and top-p find their threshold by bisection, and the draw inverts the
cumulative distribution in two levels with a single uniform number a row.

Where the vocabulary is split among devices, each has the logits of its own part, V / parts of them. A few sums and maxima of each
row travel, and the best candidates for log-probabilities; logits never do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.parallel.collectives import gather_over, max_over, min_over, part_index, parts, sum_over

MAX_TOP_LOGPROBS = 20
_DRAW_BLOCK = 128
_NONE = 2**30  # more than any token id
_THRESHOLD_BITS = 32  # enough to tell any two float32 apart
_WAYS = 16  # parts that a step of bisection over several devices makes, since a sum over them costs more than comparisons


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
    # XLA's maxima lose a NaN among numbers; infinity, which no logit is, stays.
    peak = jnp.where(jnp.isnan(logits).any(axis=-1), jnp.inf, logits.max(axis=-1))
    bad = jnp.isinf(max_over("vocab", peak))
    token = first_argmax(logits)
    sampled = rows.temperature > 0
    drawn = jax.lax.cond(jnp.any(sampled), lambda: draw(logits, rows), lambda: token)
    token = jnp.where(sampled, drawn, token)
    if state is not None:
        own = token - _first_token(logits)
        own = jnp.where((own >= 0) & (own < logits.shape[1]), own, logits.shape[1])  # others' are dropped
        counts = state.counts.at[rows.slot, own].add(2, mode="drop")
        state = state._replace(counts=counts)
    return jnp.where(bad, -1, token), state


def first_argmax(logits: Float[Array, "S V"]) -> Int[Array, " S"]:
    """Index of the largest value, the first of equals. Two plain reductions are faster than argmax's paired one."""
    best = max_over("vocab", logits.max(axis=-1))[:, None]
    index = min_over("vocab", _first_token(logits) + _first(logits == best))
    return jnp.minimum(index, logits.shape[1] * parts("vocab") - 1)  # a row of NaN equals nothing


def _first(true: Bool[Array, "S n"]) -> Int[Array, " S"]:
    """Index of the first true value, far beyond the last if there is none."""
    ids = jax.lax.broadcasted_iota(jnp.int32, true.shape, 1)
    return jnp.where(true, ids, _NONE).min(axis=-1)


def _first_token(logits: Float[Array, "S V"]) -> Array | int:
    """The token that this device's first logit belongs to."""
    return part_index("vocab") * logits.shape[1]


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
    bits = (state.allowed[rows.slot][:, :, None] >> jnp.arange(32) & 1).reshape(logits.shape[0], -1)
    if parts("vocab") == 1:
        bits = bits[:, : logits.shape[1]]
    else:
        bits = jax.lax.dynamic_slice_in_dim(bits, _first_token(logits), logits.shape[1], axis=1)
    return jnp.where(bits == 1, logits, -jnp.inf)


def draw(logits: Float[Array, "S V"], rows: RowParams) -> Int[Array, " S"]:
    """A token from each row's distribution after temperature, top-k, top-p and min-p, in that order."""
    temperature = jnp.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
    # The most likely token weighs exactly 1, whatever the temperature does to the others.
    peak = max_over("vocab", logits.max(axis=-1))[:, None]
    weights = jnp.exp((logits - peak) / temperature)

    def narrow(weights: Float[Array, "S V"]) -> Float[Array, "S V"]:
        enough = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[1] * parts("vocab"))
        floor = _threshold(weights, lambda kept: kept.sum(axis=-1), enough)
        weights = jnp.where(weights >= floor[:, None], weights, 0.0)
        # A little slack: the sums of a row's tail and of its head round differently.
        mass = rows.top_p * sum_over("vocab", weights.sum(axis=-1)) * (1 - 1e-6)
        floor = _threshold(weights, lambda kept: jnp.where(kept, weights, 0.0).sum(axis=-1), mass)
        floor = jnp.where(rows.top_p < 1, floor, 0.0)
        floor = jnp.maximum(floor, rows.min_p)
        return jnp.where(weights >= floor[:, None], weights, 0.0)

    narrows = jnp.any((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    weights = jax.lax.cond(narrows, narrow, lambda w: w, weights)
    return _invert_cdf(weights, _uniforms(rows))


def _threshold(
    weights: Float[Array, "S V"], measure: Callable[[Array], Array], enough: Array
) -> Float[Array, " S"]:
    """Largest t of each row such that what `measure` makes of `weights >= t` is `enough`, by bisection over the bits of t in (0, 1].

    Positive floats order like their bits. It must be enough for t = 0; ties at t are all kept.
    """
    ways = 2 if parts("vocab") == 1 else _WAYS

    def narrow(_, bounds):
        low, high = bounds  # enough at low, not at high
        marks = [low + ((high - low) // ways) * i + ((high - low) % ways) * i // ways for i in range(1, ways)]
        floats = [jax.lax.bitcast_convert_type(mark, jnp.float32)[:, None] for mark in marks]
        measured = sum_over("vocab", jnp.stack([measure(weights >= f) for f in floats]))
        fits = measured >= enough
        low = jnp.where(fits, jnp.stack(marks), low).max(axis=0)
        return low, jnp.where(fits, high, jnp.stack(marks)).min(axis=0)

    rows = weights.shape[:1]
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    steps = -(-_THRESHOLD_BITS // (ways.bit_length() - 1)) + (ways > 2)
    low, _ = jax.lax.fori_loop(0, steps, narrow, (jnp.zeros(rows, jnp.int32), jnp.full(rows, one + 1)))
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
    part_ends = jnp.cumsum(gather_over("vocab", ends[:, -1]), axis=-1)  # [S, parts]
    target = u * part_ends[:, -1]
    part = _first_above(part_ends, target)
    target = target - _before(part_ends, part)
    block = _first_above(ends, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, block]
    offset = _first_above(jnp.cumsum(inside, axis=-1), target - _before(ends, block))
    # Rounding may step past the block's last weight onto a token of no weight: fall back to its heaviest.
    chosen = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
    heaviest = _first(inside == inside.max(axis=-1, keepdims=True))
    token = block * _DRAW_BLOCK + jnp.where(chosen > 0, offset, heaviest)
    return sum_over("vocab", jnp.where(part == part_index("vocab"), _first_token(weights) + token, 0))


def _first_above(ends: Float[Array, "S n"], target: Float[Array, " S"]) -> Int[Array, " S"]:
    return jnp.minimum(_first(ends > target[:, None]), ends.shape[1] - 1)


def _before(ends: Float[Array, "S n"], index: Int[Array, " S"]) -> Float[Array, " S"]:
    """What the running sum was before `index`."""
    earlier = jnp.take_along_axis(ends, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(index > 0, earlier, 0.0)


def logprobs_of(logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Logprobs:
    """Log-probability of the given tokens and the most likely ones of each row."""
    peak = max_over("vocab", logits.max(axis=-1))
    log_total = peak + jnp.log(sum_over("vocab", jnp.exp(logits - peak[:, None]).sum(axis=-1)))
    size, first = logits.shape[1], _first_token(logits)
    own = jnp.maximum(tokens, 0) - first
    chosen = jnp.take_along_axis(logits, jnp.clip(own, 0, size - 1)[:, None], axis=1)[:, 0]
    chosen = sum_over("vocab", jnp.where((own >= 0) & (own < size), chosen, 0.0)) - log_total
    top, top_ids = jax.lax.top_k(logits, min(MAX_TOP_LOGPROBS, size))
    top_ids = top_ids.astype(jnp.int32) + first
    if parts("vocab") > 1:
        # [S, top, parts] to [S, parts * top]: equal ones keep the order of their ids.
        top, top_ids = (
            gather_over("vocab", x).swapaxes(1, 2).reshape(len(tokens), -1) for x in (top, top_ids)
        )
        top, place = jax.lax.top_k(top, min(MAX_TOP_LOGPROBS, top.shape[1]))
        top_ids = jnp.take_along_axis(top_ids, place, axis=1)
    return Logprobs(chosen=chosen, top=top - log_total[:, None], top_ids=top_ids)

"""Lanes: equal parts of a step's rows and blocks, each of sequences whose pages one device alone holds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.kv.cache import StepBatch
from jaxinfer.parallel.collectives import part_index, swap_over


def own_lane(batch: StepBatch) -> StepBatch:
    """The part of a step that this device's pages belong to."""
    tables = _own(batch.tables.swapaxes(0, 1), batch.num_decode, batch.lanes)
    return dataclasses.replace(
        batch,
        positions=own_tokens(batch.positions, batch),
        tables=tables.swapaxes(0, 1),
        kv_lens=_own(batch.kv_lens, batch.num_decode, batch.lanes),
        num_decode=batch.num_decode // batch.lanes,
        lanes=1,
    )


def own_tokens(x: Array, batch: StepBatch) -> Array:
    """Of an array with a row for each of the step's T tokens, this lane's T / lanes."""
    return _own(x, batch.num_decode, batch.lanes)


def heads_to_lanes(x: Float[Array, "T h d"], batch: StepBatch) -> Float[Array, "t H d"]:
    """From all tokens' values of this device's heads to this lane's tokens' values of all heads."""
    return swap_over("lanes", _by_lane(x, batch.num_decode, batch.lanes), give=0, take=2)[0]


def lanes_to_heads(x: Float[Array, "t H d"], batch: StepBatch) -> Float[Array, "T h d"]:
    """The way back."""
    x = swap_over("lanes", x[None], give=2, take=0)  # [lanes, t, h, d]
    n = batch.num_decode // batch.lanes
    return jnp.concatenate([part.reshape(-1, *x.shape[2:]) for part in (x[:, :n], x[:, n:])])


def _own(x: Array, num_decode: int, lanes: int) -> Array:
    return jax.lax.dynamic_index_in_dim(_by_lane(x, num_decode, lanes), part_index("lanes"), keepdims=False)


def _by_lane(x: Array, num_decode: int, lanes: int) -> Array:
    """[decode rows, then blocks] to [lanes, a lane's decode rows, then its blocks]."""
    parts = (x[:num_decode], x[num_decode:])
    return jnp.concatenate(
        [part.reshape(lanes, part.shape[0] // lanes, *x.shape[1:]) for part in parts], axis=1
    )

"""The grouped product in plain XLA: a loop over the tiles of rows that there are, so that matrices without rows cost nothing.

`jax.lax.ragged_dot` is not used: on CPU XLA multiplies all rows by all matrices and masks the results.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.reference import linear_blocks_reference, linear_reference
from pallas_kernels.zeros import zeros_with

_LEAST_TILE, _MOST_TILE = 8, 128  # rows of x


def grouped_linear_reference(
    x: Float[Array, "M K"], group_sizes: Int[Array, " E"], weight: Float[Array, "E N K"]
) -> Float[Array, "M N"]:
    """See `pallas_kernels.grouped_linear.grouped_linear`."""
    return _over_tiles(linear_reference, x, group_sizes, weight)


def grouped_linear_blocks_reference(
    x: Float[Array, "M K"], group_sizes: Int[Array, " E"], codes: Array, scales: Array
) -> Float[Array, "M N"]:
    """The same for weights in blocks: see `pallas_kernels.linear.blocks.BlockWeights`."""
    return _over_tiles(linear_blocks_reference, x, group_sizes, codes, scales)


def _over_tiles(
    product: Callable[..., Array], x: Float[Array, "M K"], group_sizes: Int[Array, " E"], *weights: Array
) -> Float[Array, "M N"]:
    rows, (experts, width, *_) = x.shape[0], weights[0].shape
    tile = max(_LEAST_TILE, min(_MOST_TILE, 1 << (rows // experts).bit_length()))
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    tiles = -(-group_sizes // tile)
    last_tiles = jnp.cumsum(tiles)
    first_tiles = last_tiles - tiles
    x, (y,) = zeros_with(x, (rows + tile, width))
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def body(i: Array, y: Array) -> Array:
        group = jnp.searchsorted(last_tiles, i, side="right")
        start = starts[group] + (i - first_tiles[group]) * tile
        own = (jax.lax.dynamic_index_in_dim(part, group, keepdims=False) for part in weights)
        result = product(jax.lax.dynamic_slice_in_dim(padded, start, tile), *own)
        inside = (start + jnp.arange(tile) < ends[group])[:, None]
        before = jax.lax.dynamic_slice_in_dim(y, start, tile)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(inside, result, before), start, 0)

    return jax.lax.fori_loop(0, last_tiles[-1], body, y)[:rows]

"""The product in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear.blocks import BlockWeights


def linear_reference(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """See `pallas_kernels.linear.linear`."""
    common = jnp.promote_types(x.dtype, weight.dtype)
    x, weight = x.astype(common), weight.astype(common)
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def linear_blocks_reference(x: Float[Array, "M K"], codes: Array, scales: Array) -> Float[Array, "M N"]:
    """The same for weights in blocks, which are spread out first: see `pallas_kernels.linear.blocks.BlockWeights`."""
    return linear_reference(x, BlockWeights(codes, scales).dense(x.dtype))

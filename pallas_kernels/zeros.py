"""Zeros that a loop starts from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def zeros_with[T](x: T, *shapes: tuple[int, ...]) -> tuple[T, list[Array]]:
    """x, and float32 zeros that do not exist before it.

    Zeros that depend on nothing are made for all layers of a model at once, by one fused operation, where XLA compiles for GPUs; each layer's then
    wait for it: gigabytes, for a mixture's rows.
    """
    x, zero = jax.lax.optimization_barrier((x, jnp.float32(0)))
    return x, [jnp.full(shape, zero) for shape in shapes]

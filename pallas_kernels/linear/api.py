"""Chooses an implementation of the linear product by name or by platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import choose
from pallas_kernels.linear.blocks import BlockWeights
from pallas_kernels.linear.reference import linear_blocks_reference, linear_reference

Weight = Float[Array, "N K"] | BlockWeights


def linear(x: Float[Array, "M K"], weight: Weight, *, impl: str = "auto") -> Float[Array, "M N"]:
    """x W^T with float32 accumulation and result.

    impl: "auto" takes the C++ kernel on CPU where it can do the shape and dtypes, else XLA.
    """
    if isinstance(weight, BlockWeights):
        return choose(
            impl, x, *weight, kernel=linear_blocks_native, reference=linear_blocks_reference, fits=True
        )
    return choose(impl, x, weight, kernel=linear_native, reference=linear_reference, fits=_fits(x, weight))


def linear_native(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """The kernel in native.cc. K must be a multiple of 16."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    # XLA fuses the conversion into whatever makes x.
    return jax.ffi.ffi_call("jaxinfer_linear", out)(x.astype(jnp.float32), weight)


def linear_blocks_native(x: Float[Array, "M K"], codes: Array, scales: Array) -> Float[Array, "M N"]:
    """The kernel in native.cc for the codes and scales of BlockWeights."""
    out = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("jaxinfer_linear_blocks", out)(x.astype(jnp.float32), codes, scales)


def _fits(x: jax.Array, weight: jax.Array) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return x.dtype in floats and weight.dtype in floats and x.shape[1] % 16 == 0

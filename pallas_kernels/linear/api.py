"""Chooses an implementation of the linear product by name or by platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import choose
from pallas_kernels.linear.reference import linear_reference


def linear(x: Float[Array, "M K"], weight: Float[Array, "N K"], *, impl: str = "auto") -> Float[Array, "M N"]:
    """x W^T with float32 accumulation and result.

    impl: "auto" takes the C++ kernel on CPU where it can do the shape and dtypes, else XLA.
    """
    return choose(impl, x, weight, kernel=linear_native, reference=linear_reference, fits=_fits(x, weight))


def linear_native(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """The kernel in native.cc. K must be a multiple of 16."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    # XLA fuses the conversion into whatever makes x.
    return jax.ffi.ffi_call("jaxinfer_linear", out)(x.astype(jnp.float32), weight)


def _fits(x: jax.Array, weight: jax.Array) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return x.dtype in floats and weight.dtype in floats and x.shape[1] % 16 == 0

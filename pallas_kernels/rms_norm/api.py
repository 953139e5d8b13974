"""Chooses an implementation of RMSNorm by name or by platform."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.dispatch import choose
from pallas_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float, impl: str = "auto"
) -> Float[Array, "*rows D"]:
    """x / sqrt(mean(x^2) + eps) * weight of each row (arXiv:1910.07467), in x's dtype, computed in float32.

    impl: "auto" takes the C++ kernel on CPU where it can do the shape and dtypes, else XLA. XLA's CPU backend orders the sum of a row
      by how many rows there are; the kernel does not, so that a row's result does not depend on its company.
    """
    kernel = functools.partial(rms_norm_native, eps=eps)
    reference = functools.partial(rms_norm_reference, eps=eps)
    return choose(impl, x, weight, kernel=kernel, reference=reference, fits=_fits(x, weight))


def rms_norm_native(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """The kernel in native.cc. D must be a multiple of 16, x float32."""
    return jax.ffi.ffi_call("jaxinfer_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, weight, eps=np.float32(eps)
    )


def _fits(x: jax.Array, weight: jax.Array) -> bool:
    return x.dtype == jnp.float32 and weight.dtype in (jnp.float32, jnp.bfloat16) and x.shape[-1] % 16 == 0

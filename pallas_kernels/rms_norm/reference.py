"""RMSNorm in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm_reference(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """See `pallas_kernels.rms_norm.rms_norm`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # The reference implementations round to the hidden states' dtype before they multiply by the weight.
    return ((x32 * scale).astype(x.dtype) * weight).astype(x.dtype)

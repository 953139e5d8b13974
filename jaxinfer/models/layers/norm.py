"""RMSNorm (arXiv:1910.07467), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.models.params import declare


class RMSNorm(nnx.Module):
    def __init__(self, name: str, width: int, *, eps: float, dtype: DTypeLike):
        self.weight = declare({f"{name}.weight": (width,)}, axes=(None,), dtype=dtype, init="ones")
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        # The reference rounds to the model's dtype before it multiplies by the weight.
        return (x32 * scale).astype(x.dtype) * self.weight[...]

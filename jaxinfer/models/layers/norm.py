"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.models.params import declare
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """Scales each row to unit mean square, then by offset + a learned weight."""

    def __init__(self, name: str, width: int, *, eps: float, dtype: DTypeLike, offset: float = 0.0):
        init = "zeros" if offset else "ones"
        self.weight = declare({f"{name}.weight": (width,)}, axes=(None,), dtype=dtype, init=init)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        weight = self.weight[...]
        if self.offset:
            weight = weight.astype(jnp.float32) + self.offset
        return rms_norm(x, weight, eps=self.eps)

"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.models.params import declare
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """Scales each row to unit mean square, then by a learned weight."""

    def __init__(self, name: str, width: int, *, eps: float, dtype: DTypeLike):
        self.weight = declare({f"{name}.weight": (width,)}, axes=(None,), dtype=dtype, init="ones")
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return rms_norm(x, self.weight[...], eps=self.eps)

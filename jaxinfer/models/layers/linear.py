"""Linear layers and embeddings. Weights keep the checkpoint's [out, in] layout, so stacking q, k and v is a copy-free append."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.models.params import Axis, declare
from pallas_kernels.linear import BlockWeights, linear


class Linear(nnx.Module):
    """y = x W^T + b over several checkpoint tensors at once, whose outputs follow each other in y.

    outputs: {checkpoint prefix: output width}; each prefix has `.weight` [width, in] and, with bias, `.bias` [width].
    """

    TAKES_BLOCKS = True

    def __init__(
        self,
        outputs: dict[str, int],
        in_features: int,
        *,
        axes: tuple[Axis, Axis],
        dtype: DTypeLike,
        bias: bool = False,
    ):
        self.weight = declare(
            {f"{name}.weight": (width, in_features) for name, width in outputs.items()},
            axes=axes,
            dtype=dtype,
        )
        biases = {f"{name}.bias": (width,) for name, width in outputs.items()}
        self.bias = declare(biases, axes=axes[:1], dtype=dtype, init="zeros") if bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """The result in x's dtype."""
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """The result in float32, as it was accumulated."""
        y = linear(x, self.weight.get_value())
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class Embedding(nnx.Module):
    """Token embedding [V, D]; also the output head of models that tie the two. softcap: c in c * tanh(logit / c)."""

    TAKES_BLOCKS = True

    def __init__(
        self, name: str, vocab_size: int, width: int, *, dtype: DTypeLike, softcap: float | None = None
    ):
        self.softcap = softcap
        self.weight = declare({f"{name}.weight": (vocab_size, width)}, axes=("vocab", "embed"), dtype=dtype)

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        weight = self.weight.get_value()
        return weight.rows(tokens) if isinstance(weight, BlockWeights) else weight.at[tokens].get(mode="clip")

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        logits = linear(hidden, self.weight.get_value())
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

"""Linear layers and embeddings. Weights keep the checkpoint's [out, in] layout, so stacking tensors is a copy-free append."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.models.params import Axis, declare
from jaxinfer.parallel.collectives import part_index, parts, sum_over
from pallas_kernels.linear import BlockWeights, linear


class Linear(nnx.Module):
    """y = x W^T + b over several checkpoint tensors at once.

    Where devices split the outputs, each has its share of every tensor; where they split the inputs, what they get is added up.

    Args:
      outputs: {checkpoint prefix: output width}; each prefix has `.weight` [width, in] and, with bias, `.bias` [width].
      axes: logical axes of outputs and inputs.
      groups: None: the outputs of the tensors follow each other in y, on each device its share of the first, then of the second;
        all are equally wide, or devices do not split them. Else each tensor's outputs are cut into so many groups, and y has the
        first group of every tensor, then the second (e.g. each key head after the query heads that use it).
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
        groups: int | None = None,
    ):
        count, total = len(outputs), sum(outputs.values())
        self.in_axis = axes[1]
        lead: tuple[int, ...] = ()
        names: tuple[Axis, ...] = axes[:1]
        if groups is not None:
            lead, names = (groups, total // groups), (axes[0], None)
        elif count > 1 and len(set(outputs.values())) == 1:
            lead, names = (count, total // count), (None, axes[0])
        elif count > 1 and parts(axes[0]) > 1:
            raise ValueError(f"tensors of different widths cannot be split one after the other: {outputs}")
        self.weight = declare(
            {f"{name}.weight": (width, in_features) for name, width in outputs.items()},
            axes=(*names, axes[1]),
            dtype=dtype,
            shape=(*(lead or (total,)), in_features),
            groups=groups or 1,
        )
        biases = {f"{name}.bias": (width,) for name, width in outputs.items()}
        self.bias = (
            declare(biases, axes=names, dtype=dtype, init="zeros", shape=lead or None, groups=groups or 1)
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """The result in x's dtype, which is also what devices send each other to add up."""
        y = self.partial(x)
        if parts(self.in_axis) > 1:
            y = sum_over(self.in_axis, y.astype(x.dtype))
        return self._with_bias(y).astype(x.dtype)

    def wide(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """The result in float32, as it was accumulated."""
        return self._with_bias(sum_over(self.in_axis, self.partial(x)))

    def partial(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """What this device adds to the result, in float32, without the bias."""
        return linear(x, as_matrix(self.weight.get_value()))

    def _with_bias(self, y: Float[Array, "T out"]) -> Float[Array, "T out"]:
        return y if self.bias is None else y + self.bias[...].reshape(-1).astype(jnp.float32)


def as_matrix(weight: Array | BlockWeights) -> Array | BlockWeights:
    """A weight's leading axes as one."""
    if isinstance(weight, BlockWeights):
        rows = weight.codes.reshape(-1, weight.codes.shape[-1])
        return BlockWeights(rows, weight.scales.reshape(rows.shape[0], *weight.scales.shape[-2:]))
    return weight.reshape(-1, weight.shape[-1])


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
        own = tokens - part_index("vocab") * weight.shape[0]
        rows = weight.rows(own) if isinstance(weight, BlockWeights) else weight.at[own].get(mode="clip")
        if parts("vocab") == 1:
            return rows
        here = (own >= 0) & (own < weight.shape[0])
        return sum_over("vocab", jnp.where(here[:, None], rows, 0))

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Of this device's part of the vocabulary, float32."""
        logits = linear(hidden, self.weight.get_value())
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

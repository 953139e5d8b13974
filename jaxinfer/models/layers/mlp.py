"""Gated feed-forward layer (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.errors import ConfigError
from jaxinfer.models.layers.linear import Linear

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}


@dataclass(frozen=True, slots=True)
class Activation:
    """The function that config.json calls so. A module must be told apart by its repr, and a function's holds an address."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in _ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")

    def __call__(self, x: Array) -> Array:
        return _ACTIVATIONS[self.name](x)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, name: str, width: int, hidden: int, *, act: str, bias: bool = False, dtype: DTypeLike):
        self.act = Activation(act)
        self.gate_up = Linear(
            {f"{name}.gate_proj": hidden, f"{name}.up_proj": hidden},
            width,
            axes=("ffn", "embed"),
            dtype=dtype,
            bias=bias,
        )
        self.down = Linear(
            {f"{name}.down_proj": width}, hidden, axes=("embed", "ffn"), dtype=dtype, bias=bias
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self._hidden(x))

    def partial(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What this device adds to the result, in float32, without the last bias."""
        return self.down.partial(self._hidden(x))

    def _hidden(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        # Rounding gate and up to bfloat16 first would cost accuracy and, on CPU, time.
        gate_up = self.gate_up.wide(x)
        gate, up = jnp.split(gate_up, 2, axis=1)
        return (self.act(gate) * up).astype(x.dtype)

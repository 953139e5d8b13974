"""The transformer inside vision towers (ViT, arXiv:2010.11929): LayerNorm, plain attention and a plain MLP, all with biases."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.mlp import Activation
from jaxinfer.models.layers.rope import RopeTables, apply_rope
from jaxinfer.models.params import Axis, declare
from jaxinfer.parallel.collectives import mine

_MOST_SCORES = 2**24  # held at once, of all heads


@dataclass(frozen=True, slots=True)
class Scene:
    """What the blocks of a tower have in common.

    Attributes:
      sequences: the rows [T, D] are so many sequences of equal length, one after the other, and none sees another.
      ropes: cos and sin of each row's phases; dimension 2i turns with 2i + 1.
      segments: rows of a sequence see those that have their number; None: all.
    """

    sequences: int
    ropes: RopeTables
    segments: Int[Array, " T"] | None = None


class LayerNorm(nnx.Module):
    """Each row with mean 0 and variance 1, times a learned weight, plus a learned bias (arXiv:1607.06450)."""

    def __init__(self, name: str, width: int, *, dtype: DTypeLike, eps: float = 1e-5):
        self.weight = declare({f"{name}.weight": (width,)}, axes=(None,), dtype=dtype, init="ones")
        self.bias = declare({f"{name}.bias": (width,)}, axes=(None,), dtype=dtype, init="zeros")
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        y = centred * scale * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class StackedLinear(Linear):
    """A Linear whose single tensor holds `count` equally wide matrices one after the other; devices split each of them."""

    def __init__(
        self,
        name: str,
        count: int,
        width: int,
        in_features: int,
        *,
        axes: tuple[Axis, Axis],
        dtype: DTypeLike,
    ):
        rows = count * width
        self.in_axis = axes[1]
        self.weight = declare(
            {f"{name}.weight": (rows, in_features)},
            axes=(None, *axes),
            dtype=dtype,
            shape=(count, width, in_features),
        )
        self.bias = declare(
            {f"{name}.bias": (rows,)}, axes=(None, axes[0]), dtype=dtype, init="zeros", shape=(count, width)
        )


class VisionAttention(nnx.Module):
    """Every row sees every other row of its segment.

    qkv: names of the tensors of queries, keys and values, or of the one that holds all three.
    """

    def __init__(self, qkv: tuple[str, ...], out: str, width: int, heads: int, *, dtype: DTypeLike):
        self.heads = mine(heads, "heads")
        axes = ("heads", "embed")
        if len(qkv) == 1:
            self.qkv = StackedLinear(qkv[0], 3, width, width, axes=axes, dtype=dtype)
        else:
            self.qkv = Linear(dict.fromkeys(qkv, width), width, axes=axes, dtype=dtype, bias=True)
        self.out = Linear({out: width}, width, axes=("embed", "heads"), dtype=dtype, bias=True)

    def __call__(self, x: Float[Array, "T D"], scene: Scene) -> Float[Array, "T D"]:
        rows = x.shape[0]
        q, k, v = self.qkv(x).reshape(rows, 3, self.heads, -1).swapaxes(0, 1)
        q, k = (apply_rope(y, scene.ropes, interleaved=True) for y in (q, k))
        segments = scene.segments
        mixed = attend(
            *(y.reshape(scene.sequences, -1, *y.shape[1:]) for y in (q, k, v)),
            None if segments is None else segments.reshape(scene.sequences, -1),
        )
        return self.out(mixed.reshape(rows, -1))


def attend(
    q: Float[Array, "B N H hd"],
    k: Float[Array, "B N H hd"],
    v: Float[Array, "B N H hd"],
    segments: Int[Array, "B N"] | None,
) -> Float[Array, "B N H hd"]:
    """Softmax attention without a cache, some queries at a time: large images have too many scores to hold them all."""
    batch, count, heads, width = q.shape
    turn = max(1, min(count, _MOST_SCORES // (batch * heads * count)))

    def mix(
        some: Float[Array, "B Q H hd"], seen: Bool[Array, "B Q N"] | None = None
    ) -> Float[Array, "B Q H hd"]:
        scores = jnp.einsum("bqhd,bkhd->bhqk", some, k, preferred_element_type=jnp.float32) * width**-0.5
        if seen is not None:
            scores = jnp.where(seen[:, None], scores, -jnp.inf)
        chances = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", chances, v, preferred_element_type=jnp.float32)
        return mixed.astype(v.dtype)

    def one_turn(start: Int[Array, ""]) -> Float[Array, "B Q H hd"]:
        some = jax.lax.dynamic_slice_in_dim(q, start, turn, axis=1)
        if segments is None:
            return mix(some)
        own = jax.lax.dynamic_slice_in_dim(segments, start, turn, axis=1)
        return mix(some, own[:, :, None] == segments[:, None, :])

    # The last turn begins early enough to be whole; what it repeats is dropped.
    starts = jnp.minimum(jnp.arange(-(-count // turn)) * turn, count - turn)
    if len(starts) == 1:
        return one_turn(starts[0])
    turns = jax.lax.map(one_turn, starts).swapaxes(0, 1)
    whole = turns[:, :-1].reshape(batch, -1, heads, width)
    return jnp.concatenate([whole, turns[:, -1, whole.shape[1] - count :]], axis=1)


class MLP(nnx.Module):
    """down(act(up(x)))."""

    def __init__(self, up: str, down: str, width: int, hidden: int, *, act: str, dtype: DTypeLike):
        self.act = Activation(act)
        self.up = Linear({up: hidden}, width, axes=("ffn", "embed"), dtype=dtype, bias=True)
        self.down = Linear({down: width}, hidden, axes=("embed", "ffn"), dtype=dtype, bias=True)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self.act(self.up.wide(x)).astype(x.dtype))


class VisionBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, norms: tuple[LayerNorm, LayerNorm], attention: VisionAttention, mlp: MLP):
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp

    def __call__(self, x: Float[Array, "T D"], scene: Scene) -> Float[Array, "T D"]:
        x = x + self.attention(self.attention_norm(x), scene)
        return x + self.mlp(self.mlp_norm(x))

"""Mixture of experts: a router sends each token to a few of many gated feed-forward networks (arXiv:2101.03961, arXiv:2412.19437)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import MoEConfig
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.mlp import Activation, GatedMLP
from jaxinfer.models.params import Axis, declare
from jaxinfer.parallel.collectives import part_index, parts, sum_over
from pallas_kernels.grouped_linear import grouped_linear

Layout = Literal["separate", "fused"]


class MoE(nnx.Module):
    """The sum of a token's chosen experts, weighed, and of the shared expert.

    Args:
      name: what the names of its tensors start with.
      layout: how the checkpoint stores experts. "separate" (Qwen 3, DeepSeek): {name}.gate, {name}.experts.{e}.{gate,up,down}_proj,
        {name}.shared_experts; "fused" (Llama 4): {name}.router, {name}.experts.{gate_up_proj [E, D, 2F], down_proj [E, F, D]},
        {name}.shared_expert.
    """

    def __init__(
        self,
        name: str,
        config: MoEConfig,
        width: int,
        *,
        act: str,
        layout: Layout = "separate",
        dtype: DTypeLike,
    ):
        c, fused = config, layout == "fused"
        self.config = c
        self.act = Activation(act)
        self.router = Linear(
            {f"{name}.router" if fused else f"{name}.gate": c.num_experts},
            width,
            axes=(None, "embed"),
            dtype=dtype,
        )
        self.score_bias = (
            declare(
                {f"{name}.gate.e_score_correction_bias": (c.num_experts,)},
                axes=(None,),
                dtype=jnp.float32,
                init="zeros",
            )
            if c.score_bias
            else None
        )
        experts, hidden = range(c.num_experts), c.hidden_size
        if fused:
            gate_up = {f"{name}.experts.gate_up_proj": (c.num_experts, width, 2 * hidden)}
            down = {f"{name}.experts.down_proj": (c.num_experts, hidden, width)}
        else:
            each = f"{name}.experts.{{}}.{{}}_proj.weight".format
            gate_up = {each(e, kind): (hidden, width) for e in experts for kind in ("gate", "up")}
            down = {each(e, "down"): (width, hidden) for e in experts}
        # Gate and up have an axis of their own, so that each device can have its share of both.
        self.gate_up = ExpertLinear(
            gate_up,
            (c.num_experts, 2, hidden, width),
            axes=("experts", None, "ffn", "embed"),
            transposed=fused,
            dtype=dtype,
        )
        self.down = ExpertLinear(
            down,
            (c.num_experts, width, hidden),
            axes=("experts", "embed", "ffn"),
            transposed=fused,
            dtype=dtype,
        )
        shared = f"{name}.shared_expert" if fused else f"{name}.shared_experts"
        self.shared = (
            GatedMLP(shared, width, c.shared_hidden_size, act=act, dtype=dtype)
            if c.shared_hidden_size
            else None
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        experts, weights = self.route(x)
        own = self.down.num_experts
        # Pairs of a token and an expert, sorted by expert; those of other devices' experts come last and give zeros.
        chosen = (experts - part_index("experts") * own).reshape(-1)
        chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
        order = jnp.argsort(chosen)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(experts.shape)
        sizes = jnp.bincount(chosen, length=own + 1)[:own].astype(jnp.int32)
        rows = x[order // experts.shape[1]]
        if self.config.weigh_inputs:
            rows = (rows * weights.reshape(-1)[order, None]).astype(x.dtype)
            weights = jnp.ones_like(weights)
        gate, up = jnp.split(self.gate_up(rows, sizes), 2, axis=1)
        results = self.down((self.act(gate) * up).astype(x.dtype), sizes)
        # One after the other: a sum over an axis may be made in an order that depends on the number of tokens.
        total = sum(weights[:, i, None] * results[places[:, i]] for i in range(experts.shape[1]))
        total = jnp.asarray(total)
        if self.shared is not None:
            shared = self.shared.partial(x)
            # All devices along the axis of experts have the same share of it.
            total += shared if parts("experts") == 1 else jnp.where(part_index("experts") == 0, shared, 0)
        return sum_over(("experts", "ffn"), total.astype(x.dtype))

    def route(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """The experts that each token goes to, and their weights in float32."""
        c = self.config
        logits = self.router.wide(x)
        if c.scoring == "softmax":
            scores = jnp.exp(logits - logits.max(axis=1, keepdims=True))
            scores = scores / sum_in_order(scores)
        else:
            scores = jax.nn.sigmoid(logits)
        ranks = logits if c.scoring == "topk_sigmoid" else scores
        if self.score_bias is not None:
            ranks = ranks + self.score_bias[...]
        if c.top_groups < c.num_groups:
            ranks = self._mask_groups(ranks)
        _, experts = jax.lax.top_k(ranks, c.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if c.normalize:
            weights = weights / (sum_in_order(weights) + 1e-20)
        return experts, weights * c.scale

    def _mask_groups(self, ranks: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Minus infinity for the experts that are not in the best groups."""
        c = self.config
        size = c.num_experts // c.num_groups
        best, _ = jax.lax.top_k(ranks.reshape(-1, c.num_groups, size), min(2, size))
        _, groups = jax.lax.top_k(sum_in_order(best)[..., 0], c.top_groups)
        kept = (groups[:, :, None] == jnp.arange(c.num_groups)).any(axis=1)
        return jnp.where(jnp.repeat(kept, size, axis=1), ranks, -jnp.inf)


class ExpertLinear(nnx.Module):
    """y = x W^T with a matrix for each expert.

    Args:
      sources, shape, axes, transposed: as in `declare`; the first axis is the experts', the last one the inputs'.
    """

    TAKES_BLOCKS = True

    def __init__(
        self,
        sources: dict[str, tuple[int, ...]],
        shape: tuple[int, ...],
        *,
        axes: tuple[Axis, ...],
        transposed: bool,
        dtype: DTypeLike,
    ):
        self.weight = declare(sources, axes=axes, dtype=dtype, shape=shape, transposed=transposed)

    @property
    def num_experts(self) -> int:
        """Of this device."""
        return self.weight.get_value().shape[0]

    def __call__(self, x: Float[Array, "M in"], sizes: Int[Array, " E"]) -> Float[Array, "M out"]:
        """Rows are sorted by expert, `sizes` of them each. Float32, of this device's share of the weights."""
        weight = self.weight.get_value()
        return grouped_linear(x, weight.reshape(weight.shape[0], -1, weight.shape[-1]), sizes)


def sum_in_order(x: Float[Array, "... N"]) -> Float[Array, "... 1"]:
    """The sum over the last axis, in an order that depends on nothing but its length."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        rest = x[..., 2 * half :]
        x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], rest], axis=-1)
    return x

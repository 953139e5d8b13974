#!/usr/bin/env python
"""How fast mixtures of experts are, against dense feed-forward layers with as many active parameters. Prints JSON.

Both take turns, round after round; a ratio is the median of the rounds' ratios. With few tokens the time goes to reading weights,
and the mixture reads those of all experts that any token chose: `bytes_ratio` says how many more than the dense layers have.
`temporary_mb` is what the compiled program needs beside weights and tokens: it would be large if all experts met all tokens.

    python scripts/bench_moe.py [--tokens 1 8 64 512] [--rounds 15] [--dtype bfloat16] [--experts 32] [--top-k 4] ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config.model import MoEConfig
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.moe import MoE

_KEY = jax.random.key(0)


class Stack:
    """A compiled residual stack of feed-forward layers with random weights."""

    def __init__(self, make: Callable[[str], Any], layers: int, tokens: jax.Array):
        graph, state = nnx.split(nnx.List([make(f"layers.{i}") for i in range(layers)]))
        leaves, structure = jax.tree.flatten(state)
        keys = jax.random.split(_KEY, len(leaves))
        drawn = [
            jax.random.normal(key, leaf.shape, leaf.dtype) * leaf.shape[-1] ** -0.5
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        self.state = jax.tree.unflatten(structure, drawn)

        def run(state: Any, x: jax.Array) -> jax.Array:
            for layer in nnx.merge(graph, state):
                x = x + layer(x)
            return x

        self.tokens = tokens
        self.program = jax.jit(run).lower(self.state, tokens).compile()
        self.layers = nnx.merge(graph, self.state)
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        self.program(self.state, self.tokens).block_until_ready()
        return time.perf_counter() - start

    @property
    def temporary_mb(self) -> float:
        analysis = self.program.memory_analysis()
        return float("nan") if analysis is None else analysis.temp_size_in_bytes / 1e6

    def experts_hit(self) -> float:
        """The mean over layers of how many experts any token goes to."""
        x, hit = self.tokens, []
        for layer in self.layers:
            hit.append(jnp.unique(layer.route(x)[0]).size)
            x = x + layer(x)
        return statistics.mean(hit)


def measure(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    dtype = jnp.dtype(args.dtype)
    config = MoEConfig(
        layers=tuple(range(args.layers)),
        num_experts=args.experts,
        top_k=args.top_k,
        hidden_size=args.hidden,
        normalize=True,
    )
    active = args.top_k * args.hidden
    x = jax.random.normal(_KEY, (tokens, args.width), jnp.float32)
    mixture = Stack(lambda name: MoE(name, config, args.width, act="silu", dtype=dtype), args.layers, x)
    dense = Stack(lambda name: GatedMLP(name, args.width, active, act="silu", dtype=dtype), args.layers, x)
    rounds = [(mixture.seconds(), dense.seconds()) for _ in range(args.rounds)]
    return {
        "tokens": tokens,
        "moe_tokens_per_s": round(tokens / statistics.median(m for m, _ in rounds)),
        "dense_tokens_per_s": round(tokens / statistics.median(d for _, d in rounds)),
        "ratio": round(statistics.median(d / m for m, d in rounds), 3),
        "bytes_ratio": round(mixture.experts_hit() / args.top_k, 2),
        "temporary_mb": {"moe": round(mixture.temporary_mb, 2), "dense": round(dense.temporary_mb, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixtures of experts against dense layers on this machine.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width inside one expert")
    args = parser.parse_args()
    expert_mb = 3 * args.width * args.hidden * jnp.dtype(args.dtype).itemsize / 1e6
    print(
        json.dumps(
            {
                "settings": vars(args),
                "layer_mb": {
                    "moe": round(args.experts * expert_mb, 1),
                    "active": round(args.top_k * expert_mb, 1),
                },
                "results": [measure(args, tokens) for tokens in args.tokens],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

"""Llama 1 to 3.x and its look-alikes: Mistral (sliding window), SmolLM, and others that keep its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import ModelConfig, common_from_hf
from jaxinfer.kv.cache import StepBatch
from jaxinfer.kv.pages import PageGroup
from jaxinfer.models.base import Cache, DecoderModel, Pages
from jaxinfer.models.layers.attention import Attention, RopeTables
from jaxinfer.models.layers.linear import Embedding
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.norm import RMSNorm
from jaxinfer.models.layers.rope import inverse_frequencies, rope_tables


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is llama or mistral."""
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        **common_from_hf(config, family="llama"),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=config.get("sliding_window") if config.get("model_type") == "mistral" else None,
    )


class LlamaLayer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, name: str, config: ModelConfig, *, dtype: DTypeLike):
        c = config
        self.attention_norm = RMSNorm(
            f"{name}.input_layernorm", c.hidden_size, eps=c.rms_norm_eps, dtype=dtype
        )
        self.attention = Attention(f"{name}.self_attn", c, group=0, window=c.sliding_window, dtype=dtype)
        self.mlp_norm = RMSNorm(
            f"{name}.post_attention_layernorm", c.hidden_size, eps=c.rms_norm_eps, dtype=dtype
        )
        self.mlp = GatedMLP(
            f"{name}.mlp", c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.mlp_bias, dtype=dtype
        )

    def __call__(
        self, x: Float[Array, "T D"], rope: RopeTables, batch: StepBatch, pages: Pages
    ) -> tuple[Float[Array, "T D"], Pages]:
        mixed, pages = self.attention(self.attention_norm(x), rope, batch, pages)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama(DecoderModel):
    """The whole model.

    Args:
      dtype: of the weights.
      compute_dtype: of the hidden states between products; None: as the weights.
      max_len: longest context that will be asked for, tokens; "dynamic" RoPE stretches its base for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        compute_dtype: DTypeLike | None = None,
        max_len: int | None = None,
    ):
        c = config
        self.config = c
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        self.embed = Embedding("model.embed_tokens", c.vocab_size, c.hidden_size, dtype=dtype)
        self.layers = nnx.List([LlamaLayer(f"model.layers.{i}", c, dtype=dtype) for i in range(c.num_layers)])
        self.norm = RMSNorm("model.norm", c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        tied = c.tie_word_embeddings
        self.head = None if tied else Embedding("lm_head", c.vocab_size, c.hidden_size, dtype=dtype)
        self.max_len = max_len

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        window = self.config.sliding_window
        return (PageGroup("sliding", window) if window else PageGroup("full"),)

    def __call__(
        self,
        tokens: Int[Array, " T"],
        batch: StepBatch,
        cache: Cache,
        *,
        record: dict[int, Any] | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        inv_freq, factor = inverse_frequencies(self.config.rope, self.config.head_dim, max_len=self.max_len)
        rope = rope_tables(batch.positions, inv_freq, factor)
        record = {} if record is None else record
        x = self.embed(tokens).astype(self.compute_dtype)
        written: list[jax.Array] = []
        for i, (layer, pages) in enumerate(zip(self.layers, cache, strict=True)):
            if i in record:
                record[i] = x
            x, pages = layer(x, rope, batch, pages)
            written.append(pages)
        x = self.norm(x)
        if len(self.layers) in record:
            record[len(self.layers)] = x
        return x, tuple(written)

    @property
    def output_head(self) -> Embedding:
        return self.head or self.embed

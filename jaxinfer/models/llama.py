"""Llama 1 to 3.x and its look-alikes: Mistral (sliding window), SmolLM, and others that keep its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from jaxinfer.config.model import ModelConfig, common_from_hf
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.decoder import Decoder, PreNormLayer
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.mlp import GatedMLP

# What Mistral's files may leave out.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is llama or mistral."""
    mistral = config.get("model_type") == "mistral"
    if mistral:
        config = {**_MISTRAL_DEFAULTS, **config}
    common = common_from_hf(config, family="llama")
    bias = bool(config.get("attention_bias", False))
    window = config["sliding_window"] if mistral else None
    return ModelConfig(
        **common,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        looks=("sliding",) * common["num_layers"] if window else (),
        sliding_window=window,
    )


class Llama(Decoder):
    """The whole model."""

    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> PreNormLayer:
        c = self.config
        attention = Attention(f"{name}.self_attn", c, index, place, dtype=dtype)
        mlp = GatedMLP(
            f"{name}.mlp", c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.mlp_bias, dtype=dtype
        )
        return PreNormLayer(name, c, attention, mlp, dtype=dtype)

"""Qwen 3, dense and mixture of experts (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from jaxinfer.config.model import ModelConfig, MoEConfig, common_from_hf, looks_from_hf, need
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.decoder import Decoder, PreNormLayer
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.moe import MoE

# What files may leave out.
_DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096}
_DENSE_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32, "max_window_layers": 28}
_MOE_DEFAULTS = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is qwen3 or qwen3_moe."""
    sparse = config.get("model_type") == "qwen3_moe"
    config = {**_DEFAULTS, **(_MOE_DEFAULTS if sparse else _DENSE_DEFAULTS), **config}
    common = common_from_hf(config, family="qwen3")
    bias = bool(config.get("attention_bias", False))
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    layers = common["num_layers"]
    # Only the dense models choose layers: a mixture's all slide, or none.
    first = 0 if sparse else config["max_window_layers"]
    otherwise = ["sliding" if window and i >= first else "full" for i in range(layers)]
    return ModelConfig(
        **common,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm="learned",
        looks=looks_from_hf({} if sparse else config, otherwise),
        sliding_window=window,
        moe=_moe(config, layers) if sparse else None,
    )


def _moe(config: Mapping[str, Any], layers: int) -> MoEConfig:
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    experts = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    return MoEConfig(
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0),
        num_experts=need(config, experts, "qwen3_moe"),
        top_k=need(config, "num_experts_per_tok", "qwen3_moe"),
        hidden_size=need(config, "moe_intermediate_size", "qwen3_moe"),
        normalize=bool(config.get("norm_topk_prob", False)),
    )


class Qwen3(Decoder):
    """The whole model."""

    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> PreNormLayer:
        c = self.config
        attention = Attention(f"{name}.self_attn", c, index, place, dtype=dtype)
        if c.moe is not None and index in c.moe.layers:
            mlp = MoE(f"{name}.mlp", c.moe, c.hidden_size, act=c.hidden_act, dtype=dtype)
        else:
            mlp = GatedMLP(f"{name}.mlp", c.hidden_size, c.intermediate_size, act=c.hidden_act, dtype=dtype)
        return PreNormLayer(name, c, attention, mlp, dtype=dtype)

"""Llama 4 (Scout and Maverick): chunked attention with rotation, full attention without, mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from jaxinfer.config.model import ModelConfig, MoEConfig, common_from_hf, looks_from_hf, need
from jaxinfer.config.vision import llama4_vision_from_hf
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.decoder import Decoder, PreNormLayer
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.moe import MoE

# What files may leave out.
_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is llama4_text, or llama4 with its text part inside."""
    outer = {k: config[k] for k in ("dtype", "torch_dtype") if config.get(k)}
    text = {**_DEFAULTS, **outer, **config.get("text_config", config)}
    common = common_from_hf(text, family="llama4", interleaved=True)
    layers = common["num_layers"]
    every = text.get("no_rope_layer_interval", 4)
    rotated = text.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    chunk = text["attention_chunk_size"]
    bias = bool(text.get("attention_bias", False))
    tuned = bool(text.get("attn_temperature_tuning", True))
    step = text.get("interleave_moe_layer_step", 1)
    sparse = text.get("moe_layers")
    return ModelConfig(
        **{
            **common,
            "intermediate_size": need(text, "intermediate_size_mlp", "llama4"),
        },
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm="plain" if text.get("use_qk_norm", True) else "",
        looks=looks_from_hf(text, ["chunked" if turn and chunk else "full" for turn in rotated]),
        attention_chunk=chunk,
        unrotated=tuple(i for i, turn in enumerate(rotated) if not turn),
        temperature_scale=float(text.get("attn_scale", 0.1)) if tuned else 0.0,
        temperature_floor=float(text.get("floor_scale", 8192)),
        moe=MoEConfig(
            layers=tuple(range(step - 1, layers, step) if sparse is None else sparse),
            num_experts=need(text, "num_local_experts", "llama4"),
            top_k=need(text, "num_experts_per_tok", "llama4"),
            hidden_size=common["intermediate_size"],
            scoring="topk_sigmoid",
            shared_hidden_size=common["intermediate_size"],
            weigh_inputs=True,
        ),
        tensor_prefix="language_model." if "text_config" in config else "",
        vision=llama4_vision_from_hf(config),
        image_token_id=config.get("image_token_index", config.get("image_token_id")),
    )


class Llama4(Decoder):
    """The whole model."""

    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> PreNormLayer:
        c = self.config
        attention = Attention(f"{name}.self_attn", c, index, place, dtype=dtype)
        name_mlp, act = f"{name}.feed_forward", c.hidden_act
        if c.moe is not None and index in c.moe.layers:
            mlp = MoE(name_mlp, c.moe, c.hidden_size, act=act, layout="fused", dtype=dtype)
        else:
            mlp = GatedMLP(name_mlp, c.hidden_size, c.intermediate_size, act=act, dtype=dtype)
        return PreNormLayer(name, c, attention, mlp, dtype=dtype)

"""Gemma 3, its text part (arXiv:2503.19786)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.model import ModelConfig, common_from_hf, looks_from_hf, rope_from_hf
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.base import Pages
from jaxinfer.models.decoder import Decoder, Step
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.norm import RMSNorm

# What the published files leave out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 106],
    "bos_token_id": 2,
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is gemma3_text, or gemma3 with its text part inside."""
    outer = {
        k: v for k, v in config.items() if k in ("dtype", "torch_dtype", "eos_token_id") and v is not None
    }
    text = (
        {**_DEFAULTS, **outer, **config["text_config"]}
        if "text_config" in config
        else {**_DEFAULTS, **config}
    )
    ropes = text.get("rope_parameters") or {}
    every = text.get("_sliding_window_pattern") or text["sliding_window_pattern"]
    if "full_attention" in ropes:
        text["rope_parameters"] = ropes["full_attention"]
        local = rope_from_hf({**text, "rope_parameters": ropes["sliding_attention"]})
    else:
        local = rope_from_hf({"rope_theta": text["rope_local_base_freq"]})
    common = common_from_hf(text, family="gemma3")
    bias = bool(text.get("attention_bias", False))
    looks = ["sliding" if (i + 1) % every else "full" for i in range(common["num_layers"])]
    return ModelConfig(
        **common,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm="learned",
        looks=looks_from_hf(text, looks),
        sliding_window=int(text["sliding_window"]),
        local_rope=local,
        attention_scale=float(text["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=text.get("attn_logit_softcapping"),
        final_softcap=text.get("final_logit_softcapping"),
        embed_scale=float(common["hidden_size"]) ** 0.5,
        tensor_prefix="language_model." if "text_config" in config else "",
    )


class Gemma3Layer(nnx.Module):
    """Norms before and after both attention and feed-forward."""

    def __init__(
        self, name: str, config: ModelConfig, attention: Attention, mlp: GatedMLP, *, dtype: DTypeLike
    ):
        def norm(part: str) -> RMSNorm:
            return RMSNorm(
                f"{name}.{part}", config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, offset=1.0
            )

        self.attention, self.mlp = attention, mlp
        self.before_attention, self.after_attention = (
            norm("input_layernorm"),
            norm("post_attention_layernorm"),
        )
        self.before_mlp, self.after_mlp = (
            norm("pre_feedforward_layernorm"),
            norm("post_feedforward_layernorm"),
        )

    def __call__(self, x: Float[Array, "T D"], step: Step, pages: Pages) -> tuple[Float[Array, "T D"], Pages]:
        mixed, pages = self.attention(self.before_attention(x), step, pages)
        x = x + self.after_attention(mixed)
        return x + self.after_mlp(self.mlp(self.before_mlp(x))), pages


class Gemma3(Decoder):
    """The whole model, without the vision tower that multimodal checkpoints hold beside it."""

    NORM_OFFSET = 1.0

    @property
    def unused_tensors(self) -> re.Pattern[str]:
        return re.compile(r"(vision_tower|multi_modal_projector)\.")

    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> Gemma3Layer:
        c = self.config
        attention = Attention(f"{name}.self_attn", c, index, place, dtype=dtype, norm_offset=1.0)
        mlp = GatedMLP(f"{name}.mlp", c.hidden_size, c.intermediate_size, act=c.hidden_act, dtype=dtype)
        return Gemma3Layer(name, c, attention, mlp, dtype=dtype)

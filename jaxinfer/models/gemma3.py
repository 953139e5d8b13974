"""Gemma 3, its text part (arXiv:2503.19786)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.config.model import ModelConfig, RopeConfig, common_from_hf, looks_from_hf, rope_from_hf
from jaxinfer.errors import ConfigError
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
# What multimodal files may say outside of their text part.
_OUTER = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is gemma3_text, or gemma3 with its text part inside."""
    outer = {k: v for k, v in config.items() if k in _OUTER and v is not None}
    text = {**_DEFAULTS, **outer, **config.get("text_config", config)}
    if text.get("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is not supported: such a model makes embeddings, not tokens"
        )
    text["hidden_act"] = text["hidden_activation"]
    text["rope_parameters"], local = _ropes(text)
    common = common_from_hf(text, family="gemma3")
    bias = bool(text.get("attention_bias", False))
    every, window = text["sliding_window_pattern"], text["sliding_window"]
    looks = ["sliding" if (i + 1) % every else "full" for i in range(common["num_layers"])]
    return ModelConfig(
        **common,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm="learned",
        looks=looks_from_hf(text, looks),
        sliding_window=window,
        local_rope=local,
        attention_scale=float(text["query_pre_attn_scalar"]) ** -0.5,
        # attn_logit_softcapping is Gemma 2's: these files may name it, and no implementation applies it.
        final_softcap=text.get("final_logit_softcapping"),
        embed_scale=float(common["hidden_size"]) ** 0.5,
        tensor_prefix="language_model." if "text_config" in config else "",
    )


def _ropes(text: Mapping[str, Any]) -> tuple[dict[str, Any], RopeConfig]:
    """Rotary embedding of the full layers as common_from_hf reads it, and of the sliding ones, in either style."""
    ropes = text.get("rope_parameters") or {}
    unknown = ropes.keys() - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"rope_parameters of a gemma3 model are full_attention and sliding_attention, got {min(unknown)!r}"
        )
    full, sliding = (dict(ropes.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    full = {"rope_theta": text["rope_theta"]} | full | (text.get("rope_scaling") or {})
    sliding = {"rope_theta": text["rope_local_base_freq"]} | sliding
    return full, rope_from_hf(
        {"rope_parameters": sliding, "max_position_embeddings": text["max_position_embeddings"]}
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

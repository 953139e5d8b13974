"""DeepSeek-V3 and R1 (arXiv:2412.19437), and Kimi K2 and K2.5, which share their language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from jaxinfer.config.model import MLAConfig, ModelConfig, MoEConfig, common_from_hf, need
from jaxinfer.config.vision import moonvit_from_hf
from jaxinfer.errors import ConfigError
from jaxinfer.kv.pages import LayerPlace
from jaxinfer.models.decoder import Decoder, PreNormLayer
from jaxinfer.models.layers.mla import MLA
from jaxinfer.models.layers.mlp import GatedMLP
from jaxinfer.models.layers.moe import MoE
from jaxinfer.models.layers.rope import yarn_mscale

_MOST_FURTHER_LAYERS = 8  # for multi-token prediction; their names go on counting where the layers end
# What files may leave out.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json whose model_type is deepseek_v3 or kimi_k2, or kimi_k25 with its text part inside."""
    outer = {k: config[k] for k in ("dtype", "torch_dtype", "tie_word_embeddings") if k in config}
    text = {**_DEFAULTS, **outer, **config.get("text_config", config)}
    common = common_from_hf(text, family="deepseek", interleaved=bool(text.get("rope_interleave", True)))
    mla = MLAConfig(
        q_rank=text["q_lora_rank"],
        kv_rank=need(text, "kv_lora_rank", "deepseek"),
        nope_dim=need(text, "qk_nope_head_dim", "deepseek"),
        rope_dim=need(text, "qk_rope_head_dim", "deepseek"),
        value_dim=need(text, "v_head_dim", "deepseek"),
    )
    rope = common["rope"]
    scale = (mla.nope_dim + mla.rope_dim) ** -0.5
    if rope.type != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return ModelConfig(
        # Heads share one latent, so that a key head of one's own is what each of them has.
        **{**common, "head_dim": mla.nope_dim + mla.rope_dim, "num_kv_heads": common["num_heads"]},
        attention_bias=bool(text.get("attention_bias", False)),
        attention_scale=scale,
        mla=mla,
        moe=_moe(text, common["num_layers"]),
        tensor_prefix="language_model." if "text_config" in config else "",
        vision=moonvit_from_hf(config),
        image_token_id=config.get("image_token_id", config.get("media_placeholder_token_id")),
    )


def _moe(text: Mapping[str, Any], layers: int) -> MoEConfig | None:
    if not text.get("n_routed_experts"):
        return None
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if text.get(name, known) != known:
            raise ConfigError(f"config.json: {name} {text[name]!r} is not supported, {known!r} is")
    first, every = text["first_k_dense_replace"] or 0, int(text.get("moe_layer_freq") or 1)
    hidden = need(text, "moe_intermediate_size", "deepseek")
    return MoEConfig(
        layers=tuple(i for i in range(first, layers) if i % every == 0),
        num_experts=need(text, "n_routed_experts", "deepseek"),
        top_k=need(text, "num_experts_per_tok", "deepseek"),
        hidden_size=hidden,
        scoring="sigmoid",
        normalize=bool(text.get("norm_topk_prob", True)),
        scale=float(text["routed_scaling_factor"]),
        score_bias=True,
        num_groups=int(text["n_group"] or 1),
        top_groups=int(text["topk_group"] or 1),
        shared_hidden_size=hidden * int(text["n_shared_experts"] or 0),
    )


class DeepSeek(Decoder):
    """The whole model, without the layers that predict further tokens in training."""

    @property
    def unused_tensors(self) -> re.Pattern[str]:
        further = "|".join(str(self.config.num_layers + i) for i in range(_MOST_FURTHER_LAYERS))
        return re.compile(rf"{re.escape(self.config.tensor_prefix)}model\.layers\.({further})\.")

    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> PreNormLayer:
        c = self.config
        attention = MLA(f"{name}.self_attn", c, place, dtype=dtype)
        if c.moe is not None and index in c.moe.layers:
            mlp = MoE(f"{name}.mlp", c.moe, c.hidden_size, act=c.hidden_act, dtype=dtype)
        else:
            mlp = GatedMLP(f"{name}.mlp", c.hidden_size, c.intermediate_size, act=c.hidden_act, dtype=dtype)
        return PreNormLayer(name, c, attention, mlp, dtype=dtype)

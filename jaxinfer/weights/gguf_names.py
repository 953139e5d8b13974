"""llama.cpp's names for tensors and settings, and Hugging Face's for the same, by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# One tensor [experts, out, in] there, a matrix for each expert here.
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files that we serve.

    Attributes:
      model_type: as config.json calls it.
      turned: q and k have their rows in the order of interleaved rotary pairs, which is not Hugging Face's.
      extra: fields of config.json beside the common ones; get(key) reads "<architecture>.<key>" and insists on it.
    """

    model_type: str
    turned: bool = False
    extra: Callable[[Callable[[str], Any]], Mapping[str, Any]] = lambda get: {}


def _experts(get: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


ARCHITECTURES = {
    "llama": Architecture("llama", turned=True),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", extra=_experts),
}


def hub_names(name: str, num_experts: int) -> list[str] | None:
    """Hugging Face's names for a tensor, one for each expert if it holds several; None for a name that is unknown."""
    if name in TOP:
        return [TOP[name]]
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    kind, _, suffix = rest.partition(".")
    if prefix != "blk" or not index.isdigit() or suffix not in ("weight", "bias"):
        return None
    layer = f"model.layers.{index}"
    if kind in LAYER:
        return [f"{layer}.{LAYER[kind]}.{suffix}"]
    if kind in EXPERTS and suffix == "weight":
        return [f"{layer}.mlp.experts.{e}.{EXPERTS[kind]}.weight" for e in range(num_experts)]
    return None

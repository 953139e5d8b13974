"""Model configuration: one frozen dataclass, read from a Hugging Face config.json or a GGUF's metadata.

A config is never changed after it is read; families and tests derive others with `dataclasses.replace`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.errors import ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and its long-context variants; lengths in tokens.

    factor and original_max_position mean what the variant's paper means by them: YaRN arXiv:2309.00071,
    llama3 as in Llama 3.1's release, linear arXiv:2306.15595, dynamic as in Hugging Face's "dynamic NTK".
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    frequency_divisors: tuple[float, ...] | None = (
        None  # one a frequency, as GGUF files give llama3's scaling
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder-only transformer of the Llama kind is made of; sizes are element counts."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int = 2048
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    dtype: str = "float32"  # of the stored weights
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def max_model_len(self) -> int:
        """Longest context the positions were made for, tokens."""
        rope = self.rope
        if rope.type == "yarn" and rope.original_max_position:
            # Hub files give max_position_embeddings before or after stretching; never stretch twice.
            return max(self.max_position, int(rope.original_max_position * rope.factor))
        return self.max_position


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Reads both styles: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (hub files)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = ("default", "linear", "dynamic", "llama3", "yarn")
    if kind not in known:
        raise ConfigError(f"rope type {kind!r} is not supported; known: {', '.join(known)}")
    original = scaling.get("original_max_position_embeddings")
    if original is None and kind in ("yarn", "llama3", "dynamic"):
        original = config.get("max_position_embeddings")
    factor = float(scaling.get("factor") or 1.0)
    if kind == "yarn" and "factor" not in scaling and original:
        factor = config["max_position_embeddings"] / original
    if kind not in ("default", "yarn") and "factor" not in scaling:
        raise ConfigError(f"rope type {kind!r} needs a factor in rope_scaling")
    if not math.isfinite(factor) or factor <= 0:
        raise ConfigError(f"rope factor must be a positive number, got {factor}")
    divisors = scaling.get("frequency_divisors")
    optional = ("mscale", "mscale_all_dim", "attention_factor")
    with_default = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    return RopeConfig(
        type=kind,
        theta=float(scaling.get("rope_theta", config.get("rope_theta", 10000.0))),
        factor=factor,
        original_max_position=None if original is None else int(original),
        truncate=bool(scaling.get("truncate", True)),
        partial_rotary_factor=float(
            scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        ),
        frequency_divisors=None if divisors is None else tuple(divisors),
        **{k: float(scaling[k]) for k in optional if scaling.get(k) is not None},
        **{k: float(scaling[k]) for k in with_default if scaling.get(k) is not None},
    )


def common_from_hf(config: Mapping[str, Any], *, family: str) -> dict[str, Any]:
    """The fields that every Llama-shaped config.json spells alike, as ModelConfig arguments."""

    def need(name: str) -> int:
        if config.get(name) is None:
            raise ConfigError(f"config.json has no {name!r}, which a {family} model needs")
        return int(config[name])

    heads = need("num_attention_heads")
    eos = config.get("eos_token_id")
    return {
        "family": family,
        "vocab_size": need("vocab_size"),
        "hidden_size": need("hidden_size"),
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or need("hidden_size") // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_from_hf(config),
        "max_position": int(config.get("max_position_embeddings", 2048)),
        "hidden_act": config.get("hidden_act") or config.get("hidden_activation") or "silu",
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    }

"""Model configuration: one frozen dataclass, read from a Hugging Face config.json or a GGUF's metadata.

A config is never changed after it is read; families and tests derive others with `dataclasses.replace`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxinfer.config.vision import Llama4VisionConfig, MoonViTConfig
from jaxinfer.errors import ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Look = Literal["full", "sliding", "chunked"]


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
    interleaved: bool = False  # dimension 2i turns with 2i + 1, instead of i with i + half
    frequency_divisors: tuple[float, ...] | None = (
        None  # one a frequency, as GGUF files give llama3's scaling
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: which layers have one, and how tokens choose (arXiv:2101.03961, arXiv:2412.19437).

    Attributes:
      layers: indices of the layers whose feed-forward part is a mixture; the others are dense.
      hidden_size: width inside one expert.
      top_k: experts a token goes to.
      scoring: softmax over all experts, or a sigmoid of each; "topk_sigmoid": choose by logit, weigh by its sigmoid (Llama 4).
      normalize: divide the chosen weights by their sum.
      scale: factor on the weights.
      score_bias: a learned bias is added to the scores for choosing, not for weighing.
      num_groups, top_groups: experts are in groups of equal size; only those of the best groups, by the sum of each group's
        two best scores, may be chosen.
      shared_hidden_size: width of the expert that every token goes to; 0: none.
      weigh_inputs: the weight multiplies the expert's input instead of its output (Llama 4).
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    scoring: Literal["softmax", "sigmoid", "topk_sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    score_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    shared_hidden_size: int = 0
    weigh_inputs: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.top_k} is not between 1 and {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"n_group={self.num_groups} and topk_group={self.top_groups} do not fit {self.num_experts} experts"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ConfigError(
                f"num_experts_per_tok={self.top_k} exceeds the experts of topk_group={self.top_groups} groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (arXiv:2405.04434); widths in elements.

    Attributes:
      q_rank: of the queries' low-rank projection; None: one full projection.
      kv_rank: of the latent that keys and values are made of, and that is cached.
      nope_dim, rope_dim: of the parts of a query or key without and with rotation; the rotated key is shared by all heads.
      value_dim: of one head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def latent_dim(self) -> int:
        """What one token takes in the cache: the latent, then the rotated key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder-only transformer is made of; sizes are element counts.

    Attributes:
      looks: how far each layer's queries see; empty: all "full".
      sliding_window: tokens that a query of a "sliding" layer sees, its own included.
      attention_chunk: a "chunked" layer's queries see the tokens from the last multiple of this.
      unrotated: layers without rotary embedding (NoPE).
      local_rope: rotary embedding of the sliding layers, where it differs.
      attention_scale: factor on q . k; None: head_dim ** -0.5.
      attention_softcap, final_softcap: c in c * tanh(x / c) on scores and on logits; None: no cap.
      temperature_scale, temperature_floor: a query of an unrotated layer at position p is multiplied by
        1 + scale * log(1 + floor((p + 1) / floor)) (Llama 4); scale 0: not.
      qk_norm: of each head's queries and keys: "learned" RMSNorm before rotation, or "plain" without weights after it,
        in rotated layers only.
      embed_scale: factor on embeddings.
      vision: the tower that makes embeddings of images; None: text alone.
      image_token_id: the placeholder that stands in a prompt for each row of an image's embeddings; None: no images.
      tensor_prefix: what the names of the language model's tensors start with, before "model." and "lm_head.".
      dtype: of the stored weights.
    """

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
    looks: tuple[Look, ...] = ()
    sliding_window: int | None = None
    attention_chunk: int | None = None
    unrotated: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    temperature_scale: float = 0.0
    temperature_floor: float = 1.0
    qk_norm: Literal["", "learned", "plain"] = ""
    embed_scale: float = 1.0
    vision: Llama4VisionConfig | MoonViTConfig | None = None
    image_token_id: int | None = None
    tensor_prefix: str = ""
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    dtype: str = "float32"
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
        if self.looks and len(self.looks) != self.num_layers:
            raise ConfigError(f"layer_types names {len(self.looks)} layers, but there are {self.num_layers}")
        for look, span, name in (
            ("sliding", self.sliding_window, "sliding_window"),
            ("chunked", self.attention_chunk, "attention_chunk_size"),
        ):
            if look in self.looks and (span is None or span < 1):
                raise ConfigError(f"{look} attention layers need {name} of at least 1, got {span}")

    @property
    def max_model_len(self) -> int:
        """Longest context the positions were made for, tokens."""
        rope = self.rope
        if rope.type == "yarn" and rope.original_max_position:
            # Hub files give max_position_embeddings before or after stretching; never stretch twice.
            return max(self.max_position, int(rope.original_max_position * rope.factor))
        return self.max_position


def rope_from_hf(config: Mapping[str, Any], *, interleaved: bool = False) -> RopeConfig:
    """Reads both styles: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (hub files)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    part = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        # Some implementations turn a part of each head then, others do not look at it.
        raise ConfigError(f"partial_rotary_factor={part} is not supported by models of this kind, 1 is")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = ("default", "linear", "dynamic", "llama3", "yarn")
    if kind not in known:
        raise ConfigError(f"rope type {kind!r} is not supported; known: {', '.join(known)}")
    longest, key = config.get("max_position_embeddings"), "original_max_position_embeddings"
    # Outside of the scaling it comes first; "dynamic" stretches what is past the length that the whole file is for.
    original = None if kind == "dynamic" else config.get(key) or scaling.get(key)
    if original is None and kind in ("yarn", "llama3", "dynamic"):
        original = longest
    factor = float(scaling.get("factor") or 1.0)
    if kind == "yarn" and scaling.get("factor") is None and original and longest:
        factor = longest / original
    if kind not in ("default", "yarn") and scaling.get("factor") is None:
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
        interleaved=interleaved,
        frequency_divisors=None if divisors is None else tuple(divisors),
        **{k: float(scaling[k]) for k in optional if scaling.get(k) is not None},
        **{k: float(scaling[k]) for k in with_default if scaling.get(k) is not None},
    )


def looks_from_hf(config: Mapping[str, Any], otherwise: Sequence[str]) -> tuple[Look, ...]:
    """How far each layer looks: `layer_types` where the file has it, else what the family's older files mean."""
    names: dict[str, Look] = {f"{look}_attention": look for look in get_args(Look)}
    names |= {look: look for look in get_args(Look)}
    types = config.get("layer_types") or otherwise
    unknown = sorted(set(types) - names.keys())
    if unknown:
        raise ConfigError(f"layer_types names {unknown[0]!r}; known: {', '.join(names)}")
    return tuple(names[kind] for kind in types)


def need(config: Mapping[str, Any], name: str, family: str) -> int:
    """A whole number that the family's models cannot do without. Raises ConfigError where config.json has none."""
    value = config.get(name)
    if value is None:
        raise ConfigError(f"config.json has no {name!r}, which a {family} model needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise ConfigError(f"config.json: {name} must be a whole number, got {value!r}")
    return int(value)


def common_from_hf(config: Mapping[str, Any], *, family: str, interleaved: bool = False) -> dict[str, Any]:
    """The fields that config.json files spell alike, as ModelConfig arguments.

    Args:
      interleaved: how the family's rotary embedding pairs dimensions.
    """
    heads = need(config, "num_attention_heads", family)
    width = need(config, "hidden_size", family)
    eos = config.get("eos_token_id")
    return {
        "family": family,
        "vocab_size": need(config, "vocab_size", family),
        "hidden_size": width,
        "intermediate_size": need(config, "intermediate_size", family),
        "num_layers": need(config, "num_hidden_layers", family),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or width // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_from_hf(config, interleaved=interleaved),
        "max_position": int(config.get("max_position_embeddings", 2048)),
        "hidden_act": config.get("hidden_act") or config.get("hidden_activation") or "silu",
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    }

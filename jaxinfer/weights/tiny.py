"""The tiny-<family> presets: published models shrunk until a test or a demo starts in seconds, with all that is peculiar about them.

Widths, heads, layers, experts and lengths shrink; patterns of layers, dense ones before mixtures, groups of experts, kinds of rotation
and attention, norms, and names of tensors stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfer.config.model import MLAConfig, ModelConfig, MoEConfig
from jaxinfer.config.published import published_config
from jaxinfer.config.vision import Llama4VisionConfig, MoonViTConfig
from jaxinfer.models.registry import family_for

_WIDTH = 64
_CONTEXT = 4096
_WINDOW = 32
_IMAGE_TOKEN = 500


def tiny(name: str) -> tuple[str, ModelConfig]:
    """The model_type and the config of a tiny preset."""
    source, shrink = _PRESETS[name]
    published = published_config(source)
    return published["model_type"], shrink(family_for(published).config_from_hf(published))


def _shrunk(config: ModelConfig, layers: int, **changes: Any) -> ModelConfig:
    """The first layers of a model, narrow; changes: further ones."""
    return dataclasses.replace(
        config,
        **{
            "vocab_size": 512,
            "hidden_size": _WIDTH,
            "intermediate_size": 128,
            "num_layers": layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "max_position": _CONTEXT,
            "looks": config.looks[:layers],
            "unrotated": tuple(layer for layer in config.unrotated if layer < layers),
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_ids": (2,),
            **changes,
        },
    )


def _experts(config: ModelConfig, **changes: Any) -> MoEConfig:
    assert config.moe is not None
    shared = 32 if config.moe.shared_hidden_size else 0
    return dataclasses.replace(config.moe, hidden_size=32, shared_hidden_size=shared, **changes)


def _mistral(config: ModelConfig) -> ModelConfig:
    return _shrunk(config, 2, sliding_window=_WINDOW)


def _qwen3(config: ModelConfig) -> ModelConfig:
    return _shrunk(config, 2)


def _qwen3_moe(config: ModelConfig) -> ModelConfig:
    return _shrunk(config, 2, moe=_experts(config, layers=(0, 1), num_experts=8, top_k=2))


def _gemma3(config: ModelConfig) -> ModelConfig:
    # A whole period of layers and the start of another, as its 62 layers end.
    return _shrunk(config, 8, sliding_window=_WINDOW, embed_scale=_WIDTH**0.5)


def _llama4(config: ModelConfig) -> ModelConfig:
    assert isinstance(config.vision, Llama4VisionConfig)
    vision = dataclasses.replace(
        config.vision,
        image_size=56,
        hidden_size=32,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        adapter_size=48,
        text_hidden_size=_WIDTH,
    )
    return _shrunk(
        config,
        4,
        rope=dataclasses.replace(config.rope, original_max_position=512),
        attention_chunk=_WINDOW,
        temperature_floor=16.0,
        moe=_experts(config, layers=(0, 1, 2, 3), num_experts=4),
        vision=vision,
        image_token_id=_IMAGE_TOKEN,
    )


def _latent(config: ModelConfig, **experts: Any) -> ModelConfig:
    """MLA, and a dense layer before mixtures."""
    mla = MLAConfig(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    head_dim = mla.nope_dim + mla.rope_dim
    assert config.attention_scale is not None
    return _shrunk(
        config,
        3,
        num_kv_heads=4,
        head_dim=head_dim,
        # YaRN's own factor stays in it.
        attention_scale=config.attention_scale * (config.head_dim / head_dim) ** 0.5,
        rope=dataclasses.replace(config.rope, original_max_position=64),
        mla=mla,
        moe=_experts(config, layers=(1, 2), **experts),
    )


def _deepseek_v3(config: ModelConfig) -> ModelConfig:
    return _latent(config, num_experts=16, top_k=4, num_groups=4, top_groups=2)


def _kimi_k25(config: ModelConfig) -> ModelConfig:
    assert isinstance(config.vision, MoonViTConfig)
    vision = dataclasses.replace(
        config.vision,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        table=(8, 8, 4),
        text_hidden_size=_WIDTH,
    )
    latent = _latent(config, num_experts=8, top_k=2)
    return dataclasses.replace(latent, vision=vision, image_token_id=_IMAGE_TOKEN)


_PRESETS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "tiny-mistral": ("mistral-7b-v0.1", _mistral),
    "tiny-qwen3": ("qwen3-8b", _qwen3),
    "tiny-qwen3-moe": ("qwen3-30b-a3b", _qwen3_moe),
    "tiny-gemma3": ("gemma-3-27b", _gemma3),
    "tiny-llama4": ("llama-4-scout-17b-16e", _llama4),
    "tiny-deepseek-v3": ("deepseek-v3", _deepseek_v3),
    "tiny-kimi-k25": ("kimi-k2.5", _kimi_k25),
}

"""Which family serves which checkpoint. Adding a family is one file and one line in `_FAMILIES`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config.model import ModelConfig
from jaxinfer.config.vision import Llama4VisionConfig, MoonViTConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.vision.tower import VisionTower


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a family's config.json and how to build its module from the result."""

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    model: Callable[..., DecoderModel]  # (config, *, dtype, compute_dtype, max_len) -> module


# model_type in config.json: (module in jaxinfer.models, class)
_FAMILIES = {
    "llama": ("llama", "Llama"),
    "mistral": ("llama", "Llama"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3_moe": ("qwen3", "Qwen3"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "llama4": ("llama4", "Llama4"),
    "llama4_text": ("llama4", "Llama4"),
    "deepseek_v3": ("deepseek", "DeepSeek"),
    "kimi_k2": ("deepseek", "DeepSeek"),
    "kimi_k25": ("deepseek", "DeepSeek"),
}


def family_for(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its model_type. Raises CheckpointError for one that is not supported."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        architecture = ", ".join(config.get("architectures") or ()) or "unnamed"
        raise CheckpointError(
            f"model_type {kind!r} (architecture {architecture}) is not supported; known: {', '.join(sorted(_FAMILIES))}"
        )
    module_name, class_name = _FAMILIES[kind]
    module = importlib.import_module(f"jaxinfer.models.{module_name}")
    return Family(module.config_from_hf, getattr(module, class_name))


def make_tower(config: ModelConfig, **dtypes: Any) -> VisionTower | None:
    """The vision tower of a model, None if it has none. dtypes: dtype and compute_dtype, as for the model."""
    match config.vision:
        case Llama4VisionConfig():
            return importlib.import_module("jaxinfer.models.vision.llama4").Llama4Vision(
                config.vision, **dtypes
            )
        case MoonViTConfig():
            return importlib.import_module("jaxinfer.models.vision.moonvit").MoonViT(config.vision, **dtypes)
        case _:
            return None

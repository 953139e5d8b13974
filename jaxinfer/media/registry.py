"""Which processor prepares images for which model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config.model import ModelConfig
from jaxinfer.config.vision import Llama4VisionConfig, MoonViTConfig
from jaxinfer.media.kimi import KimiImageProcessor
from jaxinfer.media.llama4 import Llama4ImageProcessor
from jaxinfer.media.processor import ImageProcessor


def make_processor(config: ModelConfig, preprocessor: Mapping[str, Any]) -> ImageProcessor | None:
    """The processor of a model, None for models of text alone. preprocessor: of preprocessor_config.json; {} if there is none."""
    match config.vision:
        case Llama4VisionConfig():
            return Llama4ImageProcessor.from_hf(preprocessor, config.vision)
        case MoonViTConfig():
            return KimiImageProcessor.from_hf(preprocessor, config.vision)
        case _:
            return None

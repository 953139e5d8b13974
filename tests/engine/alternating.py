"""A family for tests whose layers look back in turns over everything and over a window: two page groups that share one cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.config.model import ModelConfig
from jaxinfer.models import llama

WINDOW = 12


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    plain = llama.config_from_hf(config)
    looks = tuple("sliding" if i % 2 else "full" for i in range(plain.num_layers))
    return dataclasses.replace(plain, looks=looks, sliding_window=WINDOW)


class Alternating(llama.Llama):
    """Llama with such a config."""

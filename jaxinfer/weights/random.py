"""The tiny-<family> presets: a small config of each family with random weights, for tests and benchmarks of the host."""

from __future__ import annotations

import zlib
from collections.abc import Set
from pathlib import Path

import numpy as np

from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint

_STD = 0.15  # wide, so that every part of the model moves the logits
_CONFIGS = {
    "tiny-llama": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    },
}


class RandomCheckpoint(Checkpoint):
    """Weights drawn from each tensor's name: the same on every machine and in every process."""

    def __init__(self, name: str):
        self.path = Path(name)
        self.config = _CONFIGS[name]
        self.generation_config = {}
        self.stored_dtype = "float32"
        family = family_for(self.config)
        model = family.model(family.config_from_hf(self.config), dtype=np.float32)
        self._tensors = {
            source: (shape, spec.init)
            for spec in param_specs(model)
            for source, shape in zip(spec.sources, spec.source_shapes, strict=True)
        }

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def read(self, name: str) -> np.ndarray:
        shape, init = self._tensors[name]
        if init != "normal":
            return np.full(shape, 1.0 if init == "ones" else 0.0, np.float32)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(_STD)

    def tokenizer(self) -> Tokenizer | None:
        return None

"""The tiny-<family> presets: a small model of each family with random weights, for tests, demos and benchmarks of the host."""

from __future__ import annotations

import zlib
from collections.abc import Set
from pathlib import Path

import numpy as np

from jaxinfer.config.model import ModelConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for, make_tower
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.tiny import tiny

_STD = 0.15  # wide, so that every part of the model moves the logits
# As config.json has it; the other presets are shrunk from published models.
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
    """Weights drawn from each tensor's name: the same on every machine and in every process.

    `config` has the model_type alone where the model comes from `tiny`, which gives no config.json.
    """

    def __init__(self, name: str):
        self.path = Path(name)
        if name in _CONFIGS:
            self.config = _CONFIGS[name]
            self._model_config = family_for(self.config).config_from_hf(self.config)
        else:
            model_type, self._model_config = tiny(name)
            self.config = {"model_type": model_type}
        self.generation_config = {}
        self.stored_dtype = "float32"
        model = family_for(self.config).model(self._model_config, dtype=np.float32)
        tower = make_tower(self._model_config, dtype=np.float32)
        self._tensors = {
            source: (shape, spec.init)
            for spec in param_specs(model) + ([] if tower is None else param_specs(tower))
            for source, shape in zip(spec.sources, spec.source_shapes, strict=True)
        }

    def model_config(self) -> ModelConfig:
        return self._model_config

    def save_companions(self, folder: Path) -> None:
        if self.path.name not in _CONFIGS:
            raise CheckpointError(
                f"{self.path} has no config.json that could be saved with it: open the preset by its name"
            )

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

"""A checkpoint directory with everything a real one has: a tiny Llama of random weights, the byte tokenizer and its chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from safetensors.numpy import save_file

from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
}


def write_checkpoint(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    family = family_for(CONFIG)
    weights = {
        name: (rng.standard_normal(shape) * 0.15 if spec.init == "normal" else np.ones(shape)).astype(
            np.float32
        )
        for spec in param_specs(family.model(family.config_from_hf(CONFIG), dtype=np.float32))
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_byte_tokenizer(folder)
    return folder

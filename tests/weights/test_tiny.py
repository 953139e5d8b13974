"""The tiny presets keep what is peculiar about the models they come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config.model import ModelConfig
from jaxinfer.config.published import published_config
from jaxinfer.errors import CheckpointError
from jaxinfer.models.registry import _FAMILIES, family_for
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.presets import list_presets
from jaxinfer.weights.tiny import _PRESETS, tiny

# Sizes, and what follows from them; everything else must stay as it was published.
SIZES = {
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ),
    *(
        "max_position",
        "sliding_window",
        "attention_chunk",
        "temperature_floor",
        "attention_scale",
        "embed_scale",
    ),
    *("dtype", "bos_token_id", "eos_token_ids", "image_token_id"),
    *("num_experts", "top_k", "shared_hidden_size", "num_groups", "top_groups", "layers"),
    *("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "original_max_position"),
    *("image_size", "adapter_size", "text_hidden_size", "table"),
}


def structure(config: Any) -> dict[str, Any]:
    """All fields that are no sizes; of sizes, whether there are any."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            fields[field.name] = (type(value), structure(value))
        elif field.name in SIZES:
            fields[field.name] = value is None
        else:
            fields[field.name] = value
    return fields


@pytest.mark.parametrize("name", _PRESETS)
def test_structure_is_the_published_model_s(name: str):
    source, _ = _PRESETS[name]
    published = published_config(source)
    real = family_for(published).config_from_hf(published)
    model_type, small = tiny(name)
    assert model_type == published["model_type"]
    expected = structure(real)
    expected |= {
        "looks": real.looks[: small.num_layers],
        "unrotated": tuple(i for i in real.unrotated if i < small.num_layers),
        # Nothing of a tokenizer, and the same ends for all.
        "bos_token_id": True,
    }
    assert structure(small) == expected
    assert set(small.looks) == set(real.looks)
    assert bool(small.unrotated) == bool(real.unrotated)
    assert dense_and_mixtures(small) == dense_and_mixtures(real)
    if real.moe is not None and small.moe is not None:
        assert (small.moe.num_groups > small.moe.top_groups) == (real.moe.num_groups > real.moe.top_groups)
        assert small.moe.top_k < small.moe.num_experts


def dense_and_mixtures(config: ModelConfig) -> set[bool]:
    return {config.moe is not None and i in config.moe.layers for i in range(config.num_layers)}


def test_there_is_one_for_every_family():
    kinds = {open_checkpoint(p.name).config["model_type"] for p in list_presets() if p.kind == "random"}
    classes = {_FAMILIES[kind] for kind in kinds}
    assert classes == set(_FAMILIES.values())
    assert kinds >= {"llama", "mistral", "qwen3", "qwen3_moe", "gemma3", "llama4", "deepseek_v3", "kimi_k25"}


def test_weights_are_the_same_everywhere_and_include_the_tower_s():
    a, b = open_checkpoint("tiny-kimi-k25"), open_checkpoint("tiny-kimi-k25")
    assert a.names() == b.names()
    towers = [name for name in a.names() if name.startswith("vision_tower.")]
    assert towers
    for name in (*towers[:3], "language_model.model.layers.2.mlp.experts.7.up_proj.weight"):
        np.testing.assert_array_equal(a.read(name), b.read(name))


def test_saving_one_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tiny-qwen3 has no config\.json that could be saved"):
        open_checkpoint("tiny-qwen3").save_companions(tmp_path)

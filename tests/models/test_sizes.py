"""Sizes computed from declarations, against what is published of the checkpoints. That those written down are computed: tests/config/test_published.py."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from oracles import DIRECTORY
from safetensors import safe_open

from jaxinfer.config.published import KVSize, published_config, published_sizes
from jaxinfer.errors import CheckpointError
from jaxinfer.models.registry import family_for
from jaxinfer.models.sizes import sizes_of, sizes_of_config

# Elements in the checkpoints as the hub counts them, vision towers included.
EXACT = {
    "deepseek-v3": 671_026_419_200,  # without the layer for multi-token prediction
    "gemma-3-27b": 27_009_346_304,  # text alone
    "kimi-k2.5": 1_026_879_376_368,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-4-maverick-17b-128e": 401_583_781_376,
    "llama-4-scout-17b-16e": 108_641_793_536,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}
# As the model cards round them; some leave out the embedding, which is 0.9 billion at most.
ACTIVE_BILLIONS = {
    "deepseek-v3": 37,
    "kimi-k2.5": 32,
    "llama-4-maverick-17b-128e": 17,
    "llama-4-scout-17b-16e": 17,
    "qwen3-30b-a3b": 3.3,
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_those_of_the_published_checkpoint(name: str):
    sizes = published_sizes()[name]
    assert sizes.parameters + sizes.vision == EXACT[name]


@pytest.mark.parametrize("name", EXACT)
def test_active_parameters(name: str):
    sizes = published_sizes()[name]
    if name in ACTIVE_BILLIONS:
        assert 0 <= sizes.active / 1e9 - ACTIVE_BILLIONS[name] < 0.95
    else:
        assert sizes.active == sizes.parameters


def test_active_parameters_of_qwen3_30b_by_hand():
    expert, layers = 3 * 2048 * 768, 48
    sizes = published_sizes()["qwen3-30b-a3b"]
    assert sizes.parameters - sizes.active == layers * (128 - 8) * expert


def test_bytes_as_stored():
    sizes = published_sizes()
    assert sizes["kimi-k2.5"].stored_bytes == 595_148_192_736  # of the tensors in the published files
    # FP8: a byte each but for the embedding, the head, routers and norms, and scales.
    assert sizes["deepseek-v3"].stored_bytes / sizes["deepseek-v3"].parameters == pytest.approx(
        1.003, abs=1e-3
    )
    assert sizes["llama-3.1-8b"].stored_bytes == sizes["llama-3.1-8b"].bytes_in("bfloat16") == 16_060_522_496
    assert sizes["llama-3.1-8b"].bytes_in("float32") == 32_121_044_992


def test_kv_bytes_of_a_token():
    sizes = published_sizes()
    assert sizes["llama-3.1-8b"].kv == (KVSize("full", 0, 32, 2 * 8 * 128 * 2 * 32),)
    assert sizes["gemma-3-27b"].kv == (
        KVSize("sliding", 1024, 52, 2 * 16 * 128 * 2 * 52),
        KVSize("full", 0, 10, 2 * 16 * 128 * 2 * 10),
    )
    assert [(kv.look, kv.span, kv.layers) for kv in sizes["llama-4-scout-17b-16e"].kv] == [
        ("chunked", 8192, 36),
        ("full", 0, 12),
    ]
    for name in ("deepseek-v3", "kimi-k2.5"):  # a latent and a rotated key, whatever the heads
        assert sizes[name].kv == (KVSize("full", 0, 61, (512 + 64) * 2 * 61),)


@pytest.mark.parametrize(
    "name",
    [
        "llama_tied",
        "qwen3_moe",
        "gemma3_text",
        "llama4_vision",
        "deepseek_v3_fp8",
        "kimi_k25",
        "kimi_k25_int4",
    ],
)
def test_sizes_are_those_of_the_files(name: str):
    """Against real files, the quantised ones with their scales."""
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    elements = stored = 0
    for file in (DIRECTORY / name).glob("model*.safetensors"):
        with safe_open(file, "np") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(tensor)
                count = math.prod(part.get_shape())
                # Published routers' biases are float32; the recorder rounded them like all else.
                bias = tensor.endswith("e_score_correction_bias")
                elements += count
                stored += count * (4 if bias else BYTES[part.get_dtype()])
    sizes = sizes_of_config(config)
    assert sizes.stored_bytes == stored
    if "quantization_config" not in config:
        assert sizes.parameters + sizes.vision == elements


def test_an_unknown_quantisation_is_refused():
    config = published_config("llama-3.1-8b")
    family = family_for(config)
    small = dataclasses.replace(family.config_from_hf(config), num_layers=1)
    with pytest.raises(CheckpointError, match="quant_method 'gptq' is not supported"):
        sizes_of(family, small, {"quant_method": "gptq"})

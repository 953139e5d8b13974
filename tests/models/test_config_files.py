"""What config.json files say, leave out and must not say, family by family; transformers 5.24 was asked what each means."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import DIRECTORY

from jaxinfer.config.model import ModelConfig, RopeConfig, rope_from_hf
from jaxinfer.errors import ConfigError
from jaxinfer.models.layers.mlp import Activation
from jaxinfer.models.layers.rope import inverse_frequencies
from jaxinfer.models.registry import family_for

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    config = {**config, **changes}
    return family_for(config).config_from_hf(config)


def oracle(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name / "config.json").read_text())


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    assert set(names) <= config.keys()
    return {name: value for name, value in config.items() if name not in names}


# Fields a file may leave out, and what they are then.
LEFT_OUT = {
    "mistral": (LLAMA, {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072}),
    "qwen3": (LLAMA, {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}),
    "qwen3_moe": (oracle("qwen3_moe"), {"num_key_value_heads": 4, "num_experts_per_tok": 8}),
    "llama4_text": (
        oracle("llama4_text"),
        {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "attention_chunk_size": 8192,
         "head_dim": 128, "num_experts_per_tok": 1, "max_position_embeddings": 131_072, "intermediate_size_mlp": 16_384},
    ),
    "deepseek_v3": (
        oracle("deepseek_v3"),
        {"q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_files_leave_out(kind: str):
    base, fields = LEFT_OUT[kind]
    by_layer = ("layer_types", "no_rope_layers", "moe_layers")
    base = {k: v for k, v in base.items() if k not in ("rope_parameters", *by_layer)}
    base |= {"model_type": kind, "hidden_size": 64, "num_attention_heads": 64, "num_hidden_layers": 8}
    base |= {"head_dim": 2, "num_experts": 16, "n_routed_experts": 32}
    told = read(base, **fields)
    assert read(without({**base, **fields}, *fields)) == told
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert read(base, **{**fields, name: value * 2}) != told, name


def test_sizes_that_nothing_stands_for_are_asked_for():
    for name in ("kv_lora_rank", "qk_rope_head_dim", "moe_intermediate_size", "num_experts_per_tok"):
        with pytest.raises(ConfigError, match=f"no '{name}'"):
            read(without(oracle("deepseek_v3"), name))
    with pytest.raises(ConfigError, match="num_experts_per_tok must be a whole number"):
        read(oracle("qwen3_moe"), num_experts_per_tok=1.5)


def test_qwen3_windows():
    dense = {
        **LLAMA,
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "max_window_layers": 3,
    }
    assert read(dense).looks == ("full", "full", "full", "sliding")
    assert read(dense).sliding_window == 4096
    mixture = {**oracle("qwen3_moe"), "use_sliding_window": True}
    assert set(read(mixture, sliding_window=9, max_window_layers=48).looks) == {"sliding"}
    assert set(read(mixture, use_sliding_window=False, sliding_window=9).looks) == {"full"}


def test_heads_of_a_mixture_are_as_wide_as_the_width_gives():
    config = without(oracle("qwen3_moe"), "head_dim")
    assert read(config).head_dim == config["hidden_size"] // config["num_attention_heads"]


def test_llama4_without_chunks():
    config = without(oracle("llama4_text"), "layer_types")
    assert set(read(config, attention_chunk_size=None).looks) == {"full"}


PLAIN = {"rope_type": "default"}
OLD = {"rope_theta": 900.0, "rope_local_base_freq": 30.0}


@pytest.mark.parametrize(
    ("told", "whole", "local"),
    [
        (OLD, RopeConfig(theta=900.0), RopeConfig(theta=30.0)),
        ({}, RopeConfig(theta=1e6), RopeConfig(theta=1e4)),
        (
            {**OLD, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
            RopeConfig(theta=900.0),
            RopeConfig(theta=30.0),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            RopeConfig(type="linear", factor=8.0, theta=1e6),
            RopeConfig(theta=1e4),
        ),
        (
            {**OLD, "rope_parameters": {"sliding_attention": {**PLAIN, "rope_theta": 7.0}}},
            RopeConfig(theta=900.0),
            RopeConfig(theta=7.0),
        ),
        (
            {**OLD, "rope_scaling": {"type": "linear", "factor": 8.0}},
            RopeConfig(type="linear", factor=8.0, theta=900.0),
            RopeConfig(theta=30.0),
        ),
    ],
)
def test_gemma3_rotations(told: dict[str, Any], whole: RopeConfig, local: RopeConfig):
    config = read(GEMMA, **told)
    assert (config.rope, config.local_rope) == (whole, local)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [({}, {}, True), ({"tie_word_embeddings": False}, {}, False), ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, False)],
)  # fmt: skip
def test_gemma3_heads_of_multimodal_files(outer: dict[str, Any], inner: dict[str, Any], tied: bool):
    config = {"model_type": "gemma3", **outer, "text_config": {**GEMMA, **inner}}
    assert read(config).tie_word_embeddings is tied


def test_yarn_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    assert rope_from_hf({"max_position_embeddings": 128, "rope_scaling": scaling}).factor == 4.0
    outside = {"max_position_embeddings": 128, "original_max_position_embeddings": 16}
    rope = rope_from_hf({**outside, "rope_scaling": {"type": "yarn", "factor": 8.0}})
    assert (rope.original_max_position, rope.factor) == (16, 8.0)


def test_dynamic_scaling_begins_where_the_file_s_positions_end():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    rope = rope_from_hf({"max_position_embeddings": 128, "rope_scaling": scaling})
    within, _ = inverse_frequencies(rope, 8, max_len=128)
    np.testing.assert_allclose(within, inverse_frequencies(RopeConfig(), 8)[0], rtol=1e-6)


def test_llama3_scaling_with_no_room_between_its_factors():
    """Llama 4 Scout's: frequencies are either divided or kept."""
    rope = RopeConfig(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=64
    )
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, _ = inverse_frequencies(rope, 64)
    slow = 2 * np.pi / plain > 64
    assert 0 < slow.sum() < 32
    np.testing.assert_allclose(scaled, np.where(slow, plain / 8, plain), rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({**LLAMA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters of a gemma3"),
        ({**oracle("deepseek_v3"), "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({**oracle("deepseek_v3"), "topk_method": "greedy"}, "topk_method 'greedy'"),
    ],
)  # fmt: skip
def test_what_would_be_answered_wrongly_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(config)


def test_activations_by_all_of_their_names():
    x = jnp.linspace(-4, 4, 33)
    tanh = 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    for name, expected in {
        "relu": jnp.maximum(x, 0),
        "swish": x / (1 + jnp.exp(-x)),
        "gelu_new": tanh,
        "gelu_pytorch_tanh": tanh,
    }.items():
        np.testing.assert_allclose(Activation(name)(x), expected, atol=1e-6)

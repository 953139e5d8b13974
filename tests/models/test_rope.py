"""Rotary embeddings: each variant against its definition, and phases far out."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config.model import ModelConfig, RopeConfig, rope_from_hf
from jaxinfer.errors import ConfigError
from jaxinfer.models.layers.rope import apply_rope, inverse_frequencies, rope_tables

PLAIN = 1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)


def test_default_and_linear():
    inv_freq, factor = inverse_frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(inv_freq, PLAIN, rtol=1e-6)
    assert factor == 1.0
    stretched, _ = inverse_frequencies(RopeConfig(type="linear", factor=4.0), 64)
    np.testing.assert_allclose(stretched, PLAIN / 4, rtol=1e-6)


def test_dynamic_stretches_only_past_the_trained_length():
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_position=2048)
    np.testing.assert_allclose(inverse_frequencies(rope, 64, max_len=2048)[0], PLAIN, rtol=1e-6)
    stretched, _ = inverse_frequencies(rope, 64, max_len=4096)
    base = 10000.0 * (2.0 * 4096 / 2048 - 1) ** (64 / 62)
    np.testing.assert_allclose(stretched, 1.0 / base ** (np.arange(0, 64, 2) / 64), rtol=1e-5)


def test_llama3_keeps_fast_dimensions_and_divides_slow_ones():
    rope = RopeConfig(type="llama3", theta=500000.0, factor=8.0, original_max_position=8192)
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled, _ = inverse_frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert np.all((scaled < plain) & (scaled > plain / 8.0001) | ~between)


def test_yarn():
    rope = RopeConfig(type="yarn", factor=4.0, original_max_position=2048)
    scaled, factor = inverse_frequencies(rope, 64)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    rotations = 2048 * PLAIN / (2 * math.pi)  # in the trained length
    np.testing.assert_allclose(scaled[rotations > 40], PLAIN[rotations > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[rotations < 0.8], PLAIN[rotations < 0.8] / 4, rtol=1e-6)
    _, factor = inverse_frequencies(
        RopeConfig(type="yarn", factor=4.0, original_max_position=2048, mscale=1.0, mscale_all_dim=1.0), 64
    )
    assert factor == 1.0


def test_gguf_divisors():
    rope = RopeConfig(frequency_divisors=tuple(range(1, 33)))
    np.testing.assert_allclose(inverse_frequencies(rope, 64)[0], PLAIN / np.arange(1, 33), rtol=1e-6)


def test_rotation_turns_pairs_of_halves_and_keeps_the_rest():
    x = np.random.default_rng(0).standard_normal((3, 2, 10)).astype(np.float32)
    inv_freq = np.array([1.0, 0.1], np.float32)  # rotary width 4 of 10
    tables = rope_tables(jnp.array([0, 1, 7]), inv_freq, 1.0)
    out = np.asarray(apply_rope(jnp.asarray(x), tables))
    np.testing.assert_array_equal(out[0], x[0])
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    for position, row in ((1, 1), (7, 2)):
        for i, frequency in enumerate(inv_freq):
            pair = (x[row, :, i] + 1j * x[row, :, i + 2]) * np.exp(1j * position * frequency)
            np.testing.assert_allclose(out[row, :, i], pair.real, atol=1e-6)
            np.testing.assert_allclose(out[row, :, i + 2], pair.imag, atol=1e-6)


def test_phases_are_exact_far_out_whatever_the_dtype():
    positions = jnp.array([100_000, 100_001])
    cos, _ = rope_tables(positions, np.array([1.0], np.float32), 1.0)
    np.testing.assert_allclose(cos[:, 0], np.cos([100_000, 100_001]), atol=1e-3)
    assert (
        apply_rope(
            jnp.ones((2, 1, 2), jnp.bfloat16), rope_tables(positions, np.ones(1, np.float32), 1.0)
        ).dtype
        == jnp.bfloat16
    )


def test_interleaved_pairs_turn_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 10)).astype(np.float32)
    positions = np.array([0, 1, 7, 300, 9000])
    inv_freq = inverse_frequencies(RopeConfig(theta=50.0), 8)[0]
    tables = rope_tables(jnp.asarray(positions), inv_freq, 1.5)
    turned = (x[..., 0:8:2] + 1j * x[..., 1:8:2]) * 1.5 * np.exp(1j * positions[:, None] * inv_freq)[:, None]
    result = np.asarray(apply_rope(jnp.asarray(x), tables, interleaved=True))
    np.testing.assert_allclose(result[..., 0:8:2], turned.real, atol=1e-3)
    np.testing.assert_allclose(result[..., 1:8:2], turned.imag, atol=1e-3)
    np.testing.assert_array_equal(result[..., 8:], x[..., 8:])


OLD = {
    "rope_theta": 5e5,
    "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
}
NEW = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
    }
}


@pytest.mark.parametrize("style", [OLD, NEW])
def test_both_styles_of_config_are_read_and_left_alone(style: dict):
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in style.items()}
    first, second = rope_from_hf(style), rope_from_hf(style)
    assert first == second == RopeConfig(type="yarn", theta=5e5, factor=40.0, original_max_position=4096)
    assert style == copy


@pytest.mark.parametrize("max_position", [4096, 163840])
def test_yarn_length_is_stretched_once(max_position: int):
    config = ModelConfig(
        family="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=8, max_position=max_position, rope=rope_from_hf(OLD),
    )  # fmt: skip
    assert config.max_model_len == 163840


def test_yarn_without_a_factor_takes_it_from_the_lengths():
    config = {
        "max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 2048},
    }
    assert rope_from_hf(config).factor == 4.0


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "spiral", "factor": 2.0}, {"rope_type": "linear"}, {"type": "linear", "factor": -1.0}],
)
def test_impossible_scaling_is_refused(scaling: dict):
    with pytest.raises(ConfigError, match="rope"):
        rope_from_hf({"rope_scaling": scaling})

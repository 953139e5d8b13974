"""INT4 checkpoints in compressed-tensors' pack-quantized format: values, blocks, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import DIRECTORY
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import keep_blocks, param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.compressed_tensors import PackedCheckpoint
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint
from pallas_kernels.linear import BlockWeights

SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
            },
        }
    },
    "ignore": ["lm_head"],
}
NAME = "model.layers.1.mlp.down_proj.weight"


def pack(codes: np.ndarray) -> np.ndarray:
    """Eight codes of 0 to 15 a word, the first in the lowest bits. [N, K] -> [N, K / 8] int32."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint32) << (4 * i)
    return words.view(np.int32)


def quantise(name: str, shape: tuple[int, ...], rng: np.random.Generator):
    """The tensors a matrix is stored as, and the values they stand for."""
    codes = rng.integers(0, 16, shape)
    scales = rng.uniform(0.001, 0.1, (shape[0], shape[1] // 32)).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{name}_packed": pack(codes),
        f"{name}_scale": scales,
        f"{name}_shape": np.array(shape, np.int32),
    }
    return tensors, (codes - 8).astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)


@pytest.fixture
def int4(tmp_path: Path):
    """A Llama whose matrices in the layers are INT4, the expected values, and the tensors as stored."""
    write_checkpoint(tmp_path)
    rng = np.random.default_rng(1)
    stored, expected = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name:
            tensors, expected[name] = quantise(name, tensor.shape, rng)
            stored |= tensors
        else:
            stored[name] = expected[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    write_settings(tmp_path, SETTINGS)
    return tmp_path, expected, stored


def write_settings(path: Path, settings: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def load(path: Path, *, packed: bool = False):
    checkpoint = open_checkpoint(path)
    family = family_for(checkpoint.config)
    model = family.model(family.config_from_hf(checkpoint.config), dtype=jnp.float32)
    if packed:
        assert keep_blocks(model, checkpoint.block_kind)
    return param_specs(model), load_params(model, checkpoint)


@pytest.mark.parametrize("packed", [False, True])
def test_parameters_are_code_less_8_times_scale(int4, packed: bool):
    path, expected, _ = int4
    blocks = 0
    for spec, value in zip(*load(path, packed=packed), strict=True):
        parts = [expected[source].reshape(spec.groups, -1) for source in spec.sources]
        whole = np.concatenate(parts, axis=1).reshape(spec.shape)
        blocks += isinstance(value, BlockWeights)
        dense = value.dense() if isinstance(value, BlockWeights) else value
        np.testing.assert_array_equal(np.asarray(dense), whole)
    assert bool(blocks) == packed


def test_it_looks_like_a_plain_checkpoint(int4):
    path, expected, _ = int4
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, PackedCheckpoint)
    assert checkpoint.names() == expected.keys()
    for name, values in expected.items():
        assert checkpoint.shape(name) == values.shape
        np.testing.assert_array_equal(checkpoint.read(name), values)
        assert (checkpoint.block_kind(name) is not None) == ("_proj" in name)


def test_blocks_are_the_same_codes(int4):
    path, expected, _ = int4
    checkpoint = open_checkpoint(path)
    blocks = checkpoint.read_blocks(NAME)
    np.testing.assert_array_equal(BlockWeights(*map(jnp.asarray, blocks)).dense(), expected[NAME])


def test_a_matrix_that_takes_several_pieces_of_work(tmp_path: Path):
    tensors, expected = quantise("a.weight", (1300, 4096), np.random.default_rng(0))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = PackedCheckpoint(tmp_path, SETTINGS)
    assert len(checkpoint.fill("a.weight", np.empty((1300, 4096), np.float32))) > 2
    np.testing.assert_array_equal(checkpoint.read("a.weight"), expected)
    blocks = checkpoint.read_blocks("a.weight")
    np.testing.assert_array_equal(BlockWeights(*map(jnp.asarray, blocks)).dense(), expected)


def test_kimi_s_experts_are_close_to_what_they_were_made_of():
    """The packed oracle was made with the compressed-tensors package from weights like those of its bfloat16 twin."""
    path = DIRECTORY / "kimi_k25_int4"
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    checkpoint = PackedCheckpoint(path, settings)
    original = load_file(DIRECTORY / "kimi_k25" / "model.safetensors")
    experts = [name for name in original if ".experts." in name]
    assert experts
    assert checkpoint.names() == original.keys()
    for name in experts:
        scales = checkpoint.stored[f"{name}_scale"].read().astype(np.float32)
        error = np.abs(checkpoint.read(name) - original[name].astype(np.float32))
        # Half a step to the nearest code, and what the rounding of the scale to bfloat16 takes of the largest.
        assert (error <= np.repeat(scales, 32, axis=1) * (0.5 + 8 * 2**-8)).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"_scale": None}, f"holds '{NAME}_packed', but '{NAME}_scale' is missing"),
        ({"_shape": None}, f"holds '{NAME}_packed', but '{NAME}_shape' is missing"),
        ({"_packed": None}, f"holds '{NAME}_s[a-z]+', but '{NAME}_packed' is missing"),
        ({"": np.ones((64, 96), np.float32)}, f"holds '{NAME}', which is also there as '{NAME}_packed'"),
        ({"_scale": np.ones((64, 2), ml_dtypes.bfloat16)}, r"_scale' is bfloat16 of shape \(64, 2\), but"),
        ({"_scale": np.ones((64, 3), np.int8)}, r"_scale' is int8 of shape"),
        ({"_packed": np.ones((64, 12), np.int8)}, r"_packed' is int8 of shape .*, not int32 words"),
        ({"_packed": np.ones((64, 11), np.int32)}, r"_packed' is int32 of shape \(64, 11\)"),
        ({"_shape": np.ones(3, np.int32)}, r"_shape' is int32 of shape \(3,\), not two integers"),
        (
            {"_zero_point": np.ones((8, 3), np.int32)},
            r"_zero_point' is not supported; supported: .*symmetric",
        ),
        ({"_g_idx": np.zeros(96, np.int32)}, r"_g_idx' is not supported"),
    ],
)
def test_what_does_not_fit_together_is_named(int4, change, says):
    path, _, stored = int4
    changed = {**stored, **{NAME + part: tensor for part, tensor in change.items()}}
    save_file({k: v for k, v in changed.items() if v is not None}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_a_shape_that_disagrees_is_named(int4):
    path, _, stored = int4
    save_file({**stored, f"{NAME}_shape": np.array([64, 95], np.int32)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"_shape' is \(64, 95\), but the packed words hold \(64, 96\)"):
        load(path)


def test_left_over_and_missing_like_any_other(int4):
    path, _, stored = int4
    extra, _ = quantise("model.layers.7.mlp.up_proj.weight", (32, 32), np.random.default_rng(0))
    save_file({**stored, **extra}, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no place for, first 'model\.layers\.7\.mlp\.up_proj\.weight'"
    ):
        load(path)
    rest = {name: tensor for name, tensor in stored.items() if not name.startswith(NAME)}
    save_file(rest, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks 1 of .* first '{NAME}'"):
        load(path)


def test_scales_that_blocks_cannot_hold_are_spread_out(int4):
    path, expected, stored = int4
    scales = stored[f"{NAME}_scale"].astype(np.float32)
    save_file({**stored, f"{NAME}_scale": scales}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.block_kind(NAME) is None
    np.testing.assert_array_equal(checkpoint.read(NAME), expected[NAME])


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), "float-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8, "type": "float"}),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}),
        (("transform_config",), {"config_groups": {"u": {}}}),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        (("config_groups", "group_0", "format"), "nvfp4-pack-quantized"),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "weights", "type"), "float"),
        (("config_groups", "group_0", "weights", "symmetric"), False),
        (("config_groups", "group_0", "weights", "strategy"), "channel"),
        (("config_groups", "group_0", "weights", "group_size"), 128),
        (("config_groups", "group_0", "weights", "actorder"), "group"),
        (("config_groups", "group_0", "weights", "dynamic"), True),
    ],
)
def test_other_settings_are_refused_by_name(int4, where, value):
    path, _, _ = int4
    settings = copy.deepcopy(SETTINGS)
    inner = settings
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    write_settings(path, settings)
    with pytest.raises(CheckpointError, match=rf"{where[-1]}.* is not supported; supported: .*groups of 32"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {**SETTINGS, "config_groups": ["Linear"]},
            r"quantization_config\.config_groups is not a JSON object",
        ),
        (
            {**SETTINGS, "config_groups": {"a": 4}},
            r"quantization_config\.config_groups\.a is not a JSON object",
        ),
        ("int4", r"quant_method 'int4', which is not supported"),
    ],
)
def test_settings_of_another_form(int4, settings, says):
    path, _, _ = int4
    write_settings(path, settings)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_settings_may_lie_in_the_text_config(int4):
    """Kimi's config.json has them in both places, others in the inner one alone."""
    path, _, _ = int4
    config = json.loads((path / "config.json").read_text())
    settings = {**config.pop("quantization_config"), "format": "marlin-24"}
    (path / "config.json").write_text(
        json.dumps({**config, "text_config": {"quantization_config": settings}})
    )
    with pytest.raises(CheckpointError, match=r"format='marlin-24' is not supported"):
        open_checkpoint(path)

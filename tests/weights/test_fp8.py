"""FP8 checkpoints: values against blocks spread out, and what each kind of damage is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import DIRECTORY
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.fp8 import FP8Checkpoint
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint

SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 24]}
NAME = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{NAME}_scale_inv"


def quantise(values: np.ndarray, block: tuple[int, int], rng: np.random.Generator):
    """Codes, scales, and the values that they stand for, each block spread out with its scale."""
    grid = [-(-n // b) for n, b in zip(values.shape, block, strict=True)]
    scales = rng.uniform(0.001, 0.3, grid).astype(np.float32)
    spread = np.kron(scales, np.ones(block, np.float32))[: values.shape[0], : values.shape[1]]
    codes = (values / spread).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, codes.astype(np.float32) * spread


@pytest.fixture
def fp8(tmp_path: Path):
    """A Llama whose matrices in the layers are FP8, the expected values, and the tensors as stored."""
    write_checkpoint(tmp_path)
    rng = np.random.default_rng(1)
    stored, expected = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], expected[name] = quantise(tensor, (32, 24), rng)
        else:
            stored[name] = expected[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    write_settings(tmp_path, SETTINGS)
    return tmp_path, expected, stored


def write_settings(path: Path, settings: dict) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def load(path: Path, dtype=jnp.float32):
    checkpoint = open_checkpoint(path)
    family = family_for(checkpoint.config)
    model = family.model(family.config_from_hf(checkpoint.config), dtype=dtype)
    return param_specs(model), load_params(model, checkpoint)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_are_codes_times_their_blocks_scale(fp8, dtype):
    path, expected, _ = fp8
    for spec, value in zip(*load(path, dtype), strict=True):
        parts = [expected[source].reshape(spec.groups, -1) for source in spec.sources]
        whole = np.concatenate(parts, axis=1).reshape(spec.shape)
        np.testing.assert_array_equal(np.asarray(value), whole.astype(dtype))


def test_it_looks_like_a_plain_checkpoint(fp8):
    path, expected, _ = fp8
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, FP8Checkpoint)
    assert checkpoint.names() == expected.keys()
    assert checkpoint.stored_dtype == "bfloat16"
    for name, values in expected.items():
        assert checkpoint.shape(name) == values.shape
        assert checkpoint.dtype(name) == np.float32
        np.testing.assert_array_equal(checkpoint.read(name), values)


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    block=st.tuples(st.integers(1, 80), st.integers(1, 80)),
)
def test_blocks_of_every_size(tmp_path_factory: pytest.TempPathFactory, shape, block):
    path = tmp_path_factory.mktemp("fp8")
    rng = np.random.default_rng(0)
    codes, scales, expected = quantise(rng.standard_normal(shape), block, rng)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    checkpoint = FP8Checkpoint(path, {"weight_block_size": list(block)})
    np.testing.assert_array_equal(checkpoint.read("a.weight"), expected)


def test_a_matrix_that_takes_several_pieces_of_work(tmp_path: Path):
    rng = np.random.default_rng(0)
    codes, scales, expected = quantise(rng.standard_normal((2500, 4000), dtype=np.float32), (128, 128), rng)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = FP8Checkpoint(tmp_path, {"weight_block_size": [128, 128]})
    assert len(checkpoint.fill("a.weight", np.empty(codes.shape, np.float32))) > 1
    np.testing.assert_array_equal(checkpoint.read("a.weight"), expected)


def test_deepseek_s_own_layout():
    """128 x 128 blocks with partial ones at both edges, as recorded from another implementation."""
    path = DIRECTORY / "deepseek_v3_fp8"
    checkpoint = FP8Checkpoint(path, json.loads((path / "config.json").read_text())["quantization_config"])
    name = "model.layers.0.mlp.gate_proj.weight"
    codes, scales = (checkpoint.stored[name + suffix].read() for suffix in ("", "_scale_inv"))
    value = checkpoint.read(name)
    assert (value.shape, scales.shape) == ((288, 160), (3, 2))
    for i, j in [(0, 0), (127, 127), (128, 127), (127, 128), (287, 159)]:
        assert value[i, j] == codes[i, j].astype(np.float32) * scales[i // 128, j // 128]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({SCALE: None}, f"'{NAME}' is float8_e4m3fn, but its scales '{SCALE}' are missing"),
        ({NAME: None}, f"holds scales '{SCALE}', but there is no '{NAME}'"),
        ({SCALE: np.ones((2, 3), np.float32)}, r"have shape \(2, 3\), but .* in blocks of \(32, 24\) needs"),
        ({SCALE: np.ones((2, 4), np.float64)}, f"scales '{SCALE}' are float64"),
        ({NAME: np.ones((64, 96), np.float32)}, f"'{NAME}' has scales, but is float32"),
        (
            {"model.norm.weight_scale_inv": np.ones(1, np.float32)},
            r"'model\.norm\.weight' has scales, but is",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(fp8, change, says):
    path, _, stored = fp8
    changed = {name: tensor for name, tensor in {**stored, **change}.items() if tensor is not None}
    save_file(changed, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_scales_in_bfloat16(fp8):
    path, _, stored = fp8
    scales = stored[SCALE].astype(ml_dtypes.bfloat16)
    save_file({**stored, SCALE: scales}, path / "model.safetensors")
    spread = np.kron(scales.astype(np.float32), np.ones((32, 24), np.float32))
    expected = stored[NAME].astype(np.float32) * spread[:64, :96]
    np.testing.assert_array_equal(open_checkpoint(path).read(NAME), expected)


def test_missing_and_truncated_like_any_other(fp8):
    path, _, stored = fp8
    rest = {name: tensor for name, tensor in stored.items() if name not in (NAME, SCALE)}
    save_file(rest, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks 1 of .* first '{NAME}'"):
        load(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weight_block_size": None}, r"weight_block_size None is not supported; supported: .*\[128, 128\]"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        ({"fmt": "e5m2"}, r"fmt 'e5m2' is not supported"),
        ({"activation_scheme": "static"}, r"activation_scheme 'static' is not supported"),
    ],
)
def test_other_settings_are_refused(fp8, settings, says):
    path, _, _ = fp8
    write_settings(path, {**SETTINGS, **settings})
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "mxfp4", None])
def test_other_methods_are_refused_before_weights_are_looked_at(fp8, method):
    path, _, _ = fp8
    write_settings(path, {"quant_method": method, "bits": 4})
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"quant_method {method!r}, which is not supported; known: fp8"):
        open_checkpoint(path)


def test_float8_without_settings_is_refused(fp8):
    path, _, stored = fp8
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    save_file(plain, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is float8_e4m3fn, but weights are .*quantization_config"):
        load(path)

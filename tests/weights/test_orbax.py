"""Parameters saved with Orbax: the same ones come back, on whatever devices, with the tokenizer; damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import EOS
from oracles import load_oracle
from safetensors.numpy import load_file
from test_checkpoints import to_gguf
from tiny_checkpoint import CONFIG, write_checkpoint

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import keep_blocks, param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.companions import open_tokenizer
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.orbax import OrbaxCheckpoint, save_parameters
from pallas_kernels.linear import BlockWeights


def model_for(checkpoint: Checkpoint, dtype=jnp.float32, *, packed: bool = False):
    family = family_for(checkpoint.config)
    model = family.model(family.config_from_hf(checkpoint.config), dtype=dtype)
    if packed:
        assert keep_blocks(model, checkpoint.block_kind)
    return model


def save(source: Path, folder: Path, dtype=jnp.float32, *, packed: bool = False):
    checkpoint = open_checkpoint(source)
    model = model_for(checkpoint, dtype, packed=packed)
    params = load_params(model, checkpoint)
    save_parameters(folder, param_specs(model), params, checkpoint)
    return params


@pytest.fixture
def saved(tmp_path: Path):
    """A saved model's directory, and its parameters."""
    source = tmp_path / "source"
    source.mkdir()
    params = save(write_checkpoint(source), tmp_path / "saved")
    return tmp_path / "saved", params


def assert_same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_come_back_as_they_were(tmp_path: Path, dtype):
    source = tmp_path / "source"
    source.mkdir()
    params = save(write_checkpoint(source), tmp_path / "saved", dtype)
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert isinstance(checkpoint, OrbaxCheckpoint)
    assert jnp.dtype(checkpoint.stored_dtype) == dtype
    assert_same(load_params(model_for(checkpoint, dtype), checkpoint), params)


def test_the_same_model_with_its_tokenizer(saved, tmp_path: Path):
    path, _ = saved
    settings = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    first, second = (LLM(p, warm_up=False, max_num_seqs=1) for p in (tmp_path / "source", path))
    answers = [llm.generate("Hello", settings)[0].outputs[0] for llm in (first, second)]
    assert answers[0].text == answers[1].text
    messages = [{"role": "user", "content": "Hello"}]
    chats = [llm.chat(messages, settings)[0].outputs[0].token_ids for llm in (first, second)]
    assert chats[0] == chats[1]
    assert second.tokenizer is not None
    assert EOS in second.tokenizer.eos_token_ids


def test_a_model_saves_itself(smollm2_path: Path, tmp_path: Path):
    """Weights in blocks stay so, and the tokenizer comes along."""
    options: dict[str, Any] = {"warm_up": False, "max_num_seqs": 1, "max_model_len": 256}
    first = LLM(smollm2_path, **options)
    first.save(tmp_path / "saved")
    second = LLM(tmp_path / "saved", **options)
    assert_same(first.params, second.params)
    assert any(isinstance(value, BlockWeights) for value in second.params)
    settings = SamplingParams(max_tokens=6, temperature=0)
    texts = [llm.generate("The capital of France is", settings)[0].outputs[0].text for llm in (first, second)]
    assert texts[0] == texts[1] != ""
    with pytest.raises(CheckpointError, match="exists"):
        second.save(tmp_path / "saved")


def test_images_towers_are_saved_too(tmp_path: Path):
    oracle = load_oracle("llama4_vision")
    options: dict[str, Any] = {"dtype": "float32", "warm_up": False, "max_num_seqs": 1, "max_model_len": 128}
    first = LLM(oracle.path, tp=2, **options)
    first.save(tmp_path / "saved")
    second = LLM(tmp_path / "saved", **options)
    assert second.tower is not None
    assert_same(first.params, second.params)
    assert second.image_processor is not None


def test_tensors_are_found_in_their_parameters(saved, tmp_path: Path):
    path, _ = saved
    checkpoint = open_checkpoint(path)
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert checkpoint.names() == stored.keys()
    for name, tensor in stored.items():
        assert checkpoint.shape(name) == tensor.shape
        assert checkpoint.dtype(name) == tensor.dtype
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_another_dtype(saved):
    path, params = saved
    checkpoint = open_checkpoint(path)
    restored = load_params(model_for(checkpoint, jnp.bfloat16), checkpoint)
    assert_same(restored, jax.tree.map(lambda value: value.astype(jnp.bfloat16), params))


@pytest.mark.parametrize("packed", [True, False])
def test_blocks_of_codes(tmp_path: Path, packed: bool):
    """They are saved as they are, and spread out when they are to be plain numbers."""
    source = to_gguf(tmp_path / "m.gguf", "tiny-llama", quantised="Q4_1")
    params = save(source, tmp_path / "saved", packed=True)
    checkpoint = open_checkpoint(tmp_path / "saved")
    restored = load_params(model_for(checkpoint, packed=packed), checkpoint)
    blocks = [isinstance(value, BlockWeights) for value in params]
    assert any(blocks)
    if packed:
        assert [isinstance(value, BlockWeights) for value in restored] == blocks
        assert_same(restored, params)
    else:
        assert_same(restored, [v.dense() if isinstance(v, BlockWeights) else v for v in params])
    name = "model.layers.1.self_attn.k_proj.weight"
    plain = open_checkpoint(source).read(name)
    np.testing.assert_allclose(checkpoint.read(name), plain, rtol=3e-7, atol=1e-7 * np.abs(plain).max())


def test_the_tokenizer_of_a_gguf(smollm2_path: Path, tmp_path: Path):
    source = open_checkpoint(smollm2_path)
    source.save_companions(tmp_path)
    before, after = source.tokenizer(), open_tokenizer(tmp_path)
    assert before is not None
    assert after is not None
    assert after.encode("Hello there") == before.encode("Hello there")
    assert after.chat_templates == before.chat_templates


def test_what_said_how_the_files_were_quantised_is_gone(saved, tmp_path: Path):
    path, params = saved
    checkpoint = open_checkpoint(path)
    model = model_for(checkpoint)
    checkpoint.config = {
        **CONFIG,
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"quantization_config": {}, "a": 1},
    }
    save_parameters(tmp_path / "again", param_specs(model), params, checkpoint)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config == {**CONFIG, "text_config": {"a": 1}}


_OTHER_MESH = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.companions import open_tokenizer
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.orbax import save_parameters

path = Path(sys.argv[1])
assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("tensor",))
def sharding_of(spec):
    return NamedSharding(mesh, PartitionSpec(*[None] * (len(spec.shape) - 1), "tensor"))
checkpoint = open_checkpoint(path)
family = family_for(checkpoint.config)
model = family.model(family.config_from_hf(checkpoint.config), dtype=np.float32)
specs = param_specs(model)
params = load_params(model, checkpoint, sharding_of)
for spec, value in zip(specs, params, strict=True):
    assert value.sharding == sharding_of(spec)
    assert len(value.addressable_shards) == 2
    assert value.addressable_shards[1].data.shape[-1] == spec.shape[-1] // 2
save_parameters(path.parent / "split", specs, params, checkpoint)
"""


def test_onto_another_mesh_and_back(saved):
    """Saved from one device, restored onto two, saved from those, restored onto one."""
    path, params = saved
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _OTHER_MESH, str(path)], env=env, check=True)
    checkpoint = open_checkpoint(path.parent / "split")
    assert_same(load_params(model_for(checkpoint), checkpoint), params)


# Damage


def test_a_taken_place_is_left_alone(saved):
    path, _ = saved
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with pytest.raises(CheckpointError, match=r"saved exists: choose a new directory"):
        save(path.parent / "source", path)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "source"
    source.mkdir()
    write_checkpoint(source)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxinfer.weights.orbax._manifest", full)
    with pytest.raises(CheckpointError, match=r"saved cannot be written .*No space left on device"):
        save(source, tmp_path / "saved")
    assert sorted(tmp_path.iterdir()) == [source]


def test_files_that_are_missing_or_short_are_named(saved):
    path, _ = saved
    for file in [f for f in (path / "parameters").rglob("*") if f.is_file()]:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=f"{file.name} is truncated or changed"):
            open_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            open_checkpoint(path)
        file.write_bytes(content)
    assert open_checkpoint(path).names()


def edit_manifest(path: Path, change) -> None:
    manifest = json.loads((path / "parameters.json").read_text())
    change(manifest)
    (path / "parameters.json").write_text(json.dumps(manifest))


def test_missing_and_left_over_parameters_are_named(saved):
    path, _ = saved
    manifest = (path / "parameters.json").read_text()
    edit_manifest(path, lambda m: m["parameters"].pop("layers.1.mlp.down.weight"))
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* first 'model\.layers\.1\.mlp\.down_proj"):
        load_params(model_for(checkpoint), checkpoint)
    (path / "parameters.json").write_text(manifest)
    edit_manifest(
        path, lambda m: m["parameters"].update(x={"sources": {"x": [1]}, "dtype": "float32", "blocks": None})
    )
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"no place for, first 'x'"):
        load_params(model_for(checkpoint), checkpoint)


def test_another_layout_asks_to_save_again(saved):
    path, _ = saved

    def reverse(manifest: dict) -> None:
        entry = manifest["parameters"]["layers.1.mlp.gate_up.weight"]
        entry["sources"] = dict(reversed(entry["sources"].items()))

    edit_manifest(path, reverse)
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.gate_proj\.weight' otherwise than"):
        load_params(model_for(checkpoint), checkpoint)


def test_another_format_and_no_format(saved):
    path, _ = saved
    edit_manifest(path, lambda m: m.update(format=2))
    with pytest.raises(CheckpointError, match=r"parameters\.json is of format 2; known: 1"):
        open_checkpoint(path)
    (path / "parameters.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match=r"parameters\.json lacks 'dtype': save the model again"):
        open_checkpoint(path)

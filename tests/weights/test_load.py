"""How parameters are filled: dtypes, order, threads, devices, and what a model leaves unused."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import CONFIG, write_checkpoint

from jaxinfer.errors import CheckpointError
from jaxinfer.models.llama import Llama
from jaxinfer.models.params import ParamSpec, param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.progress import LoadProgress
from jaxinfer.weights.safetensors import HuggingFaceCheckpoint

NAME = "model.layers.1.mlp.up_proj.weight"


def model_of(kind: type[Llama] = Llama, dtype=jnp.float32, **changes) -> Llama:
    config = dataclasses.replace(family_for(CONFIG).config_from_hf(CONFIG), **changes)
    return kind(config, dtype=dtype)


def rewrite(path: Path, change) -> dict[str, np.ndarray]:
    """Changes every tensor of a checkpoint by name."""
    stored = load_file(path / "model.safetensors")
    changed = {name: change(name, tensor) for name, tensor in stored.items()}
    save_file(changed, path / "model.safetensors")
    return changed


@pytest.mark.parametrize("served", [jnp.float32, jnp.bfloat16])
def test_dtypes_may_differ_from_tensor_to_tensor(tmp_path: Path, served):
    dtypes = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    path = write_checkpoint(tmp_path)
    names = sorted(load_file(path / "model.safetensors"))
    stored = rewrite(path, lambda name, tensor: tensor.astype(dtypes[names.index(name) % len(dtypes)]))
    model = model_of(dtype=served)
    for spec, value in zip(param_specs(model), load_params(model, open_checkpoint(path)), strict=True):
        parts = [stored[source].astype(served).reshape(spec.groups, -1) for source in spec.sources]
        assert isinstance(value, jax.Array)
        assert value.dtype == served
        np.testing.assert_array_equal(np.asarray(value).ravel(), np.concatenate(parts, axis=1).ravel())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float64"}, "float32"),
        ({"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16", "text_config": None}, "float16"),
    ],
)
def test_the_dtype_to_serve_in_is_the_config_s_or_that_of_most_bytes(
    tmp_path: Path, config: dict, expected: str
):
    tensors = {"a": np.zeros(9, ml_dtypes.bfloat16), "b": np.zeros(4, np.float32), "c": np.zeros(99, np.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert HuggingFaceCheckpoint(tmp_path).stored_dtype == expected


def test_every_bit_pattern_of_bfloat16_survives(tmp_path: Path):
    path = write_checkpoint(tmp_path)
    bits = np.arange(64 * 96, dtype=np.uint16).reshape(96, 64) * 11
    rewrite(path, lambda name, tensor: bits.view(ml_dtypes.bfloat16) if name == NAME else tensor)
    model = model_of(dtype=jnp.bfloat16)
    values = dict(
        zip([s.sources for s in param_specs(model)], load_params(model, open_checkpoint(path)), strict=True)
    )
    stacked = next(value for sources, value in values.items() if NAME in sources)
    np.testing.assert_array_equal(np.asarray(stacked).reshape(-1, 64)[96:].view(np.uint16), bits)


def test_tensors_larger_than_one_piece_of_work(tmp_path: Path):
    """Rows of the pieces meet without a gap, whether they are cast or not."""
    rng = np.random.default_rng(0)
    tensor = rng.standard_normal((3001, 2048), dtype=np.float32)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = HuggingFaceCheckpoint(tmp_path)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        turned = np.empty((2048, 3001), dtype).T
        for out in (np.empty((3001, 2048), dtype), turned):
            tasks = checkpoint.fill("a", out)
            assert len(tasks) > 1
            for task in reversed(tasks):
                task()
            np.testing.assert_array_equal(out, tensor.astype(dtype))


def test_on_cpu_parameters_are_used_where_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filled = []
    fill = HuggingFaceCheckpoint.fill

    def recorded(self, name, out, start=0):
        filled.append((out.ctypes.data, out.nbytes))
        return fill(self, name, out, start)

    monkeypatch.setattr(HuggingFaceCheckpoint, "fill", recorded)
    model = model_of()
    params = load_params(model, open_checkpoint(write_checkpoint(tmp_path)))
    places = {value.unsafe_buffer_pointer() for value in jax.tree.leaves(params)}
    assert places <= {start for start, _ in filled}


def test_every_device_gets_its_slice(tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(spec.shape) - 1), "tensor"))

    model, checkpoint = model_of(), open_checkpoint(write_checkpoint(tmp_path))
    whole = load_params(model, checkpoint)
    split = load_params(model, checkpoint, sharding_of)
    for spec, a, b in zip(param_specs(model), whole, split, strict=True):
        assert isinstance(b, jax.Array)
        assert b.sharding == sharding_of(spec)
        np.testing.assert_array_equal(a, b)
        assert {shard.data.shape[-1] for shard in b.addressable_shards} == {spec.shape[-1] // 2}


class TwoOfThree(Llama):
    """A Llama that has no use for the layers behind its own, nor for a tower beside it."""

    @property
    def unused_tensors(self) -> re.Pattern[str]:
        return re.compile(r"model\.layers\.2\.|vision\.")


def test_tensors_that_a_family_does_not_use(tmp_path: Path):
    path = write_checkpoint(tmp_path)
    stored = load_file(path / "model.safetensors")
    more = {"vision.patch.weight": np.zeros((3, 3), np.int8), "model.layers.2.extra.weight": np.zeros(3)}
    save_file({**stored, **more}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 tensors .* no place for"):
        load_params(model_of(), open_checkpoint(path))
    assert load_params(model_of(TwoOfThree), open_checkpoint(path))
    save_file({**stored, **more, "a.vision.weight": np.zeros(3)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 1 tensors .* first 'a\.vision\.weight'"):
        load_params(model_of(TwoOfThree), open_checkpoint(path))


def test_a_head_is_left_over_only_where_it_is_tied(tmp_path: Path):
    """Which of a config's parts says so is the family's business: the model is asked, not the file."""
    path = write_checkpoint(tmp_path)
    tied = load_params(model_of(tie_word_embeddings=True), open_checkpoint(path))
    assert len(load_params(model_of(), open_checkpoint(path))) == len(tied) + 1


@pytest.mark.parametrize("copied", [True, False])
def test_a_tied_head_that_is_no_copy_is_told_of(
    copied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write_checkpoint(tmp_path)
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(path, lambda name, tensor: embed if copied and name == "lm_head.weight" else tensor)
    load_params(model_of(tie_word_embeddings=True), open_checkpoint(path))
    assert ("lm_head.weight' is ignored" in caplog.text) is not copied


def test_nothing_is_read_before_all_of_it_is_known_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_checkpoint(tmp_path)
    last = sorted(load_file(path / "model.safetensors"))[-1]
    rewrite(path, lambda name, tensor: tensor[:-1] if name == last else tensor)
    monkeypatch.setattr(HuggingFaceCheckpoint, "fill", lambda *_: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=f"'{last}' has shape"):
        load_params(model_of(), open_checkpoint(path))


def test_a_file_that_is_cut_while_it_is_loaded(tmp_path: Path):
    path = write_checkpoint(tmp_path)
    checkpoint = open_checkpoint(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter while it was read"):
        load_params(model_of(), checkpoint)


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with LoadProgress(10) as progress:
        progress.add(10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LoadProgress(2_000_000) as progress:
        progress.add(1_000_000)
    assert "loading weights" in capsys.readouterr().err

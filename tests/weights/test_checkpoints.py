"""Checkpoints from disk: what is read, and what each kind of damage is answered with."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import DIRECTORY, load_oracle
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.build import end_ids, serving_dtype
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.gguf import GGUFCheckpoint, unpermute
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.random import RandomCheckpoint
from jaxinfer.weights.safetensors import HuggingFaceCheckpoint
from pallas_kernels.linear import BlockWeights


@pytest.fixture
def copy(tmp_path: Path):
    """A writable copy of an oracle's checkpoint."""

    def make(name: str = "llama_tied") -> Path:
        path = tmp_path / name
        path.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(DIRECTORY / name / file, path / file)
        return path

    return make


def load(path: Path, dtype: str = "float32"):
    checkpoint = open_checkpoint(path)
    family = family_for(checkpoint.config)
    model = family.model(family.config_from_hf(checkpoint.config), dtype=jnp.dtype(dtype))
    return param_specs(model), load_params(model, checkpoint)


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def shard(path: Path, count: int) -> dict[str, str]:
    """Splits model.safetensors into `count` files with an index, as the hub does; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_parameters_are_the_stacked_tensors(copy):
    path = copy("llama3")
    stored = load_file(path / "model.safetensors")
    specs, params = load(path, "bfloat16")
    assert sum(len(spec.sources) for spec in specs) == len(stored)
    for spec, value in zip(specs, params, strict=True):
        assert isinstance(value, jax.Array)
        assert value.dtype == jnp.bfloat16
        # The i-th groups of all tensors stand together.
        groups = [np.split(stored[source], spec.groups) for source in spec.sources]
        expected = np.concatenate([part for group in zip(*groups, strict=True) for part in group]).reshape(
            value.shape
        )
        assert expected.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(value).view(np.uint16), expected.view(np.uint16))


def test_shards_give_the_same_parameters(copy):
    path = copy()
    _, single = load(path)
    shard(path, 3)
    _, sharded = load(path)
    for a, b in zip(single, sharded, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tensor_is_taken_only_from_the_shard_the_index_names(copy):
    path = copy()
    _, single = load(path)
    weight_map = shard(path, 2)
    name = next(n for n, f in weight_map.items() if "00001" in f)
    other = path / next(f for f in weight_map.values() if "00002-of" in f)
    save_file({**load_file(other), name: np.zeros_like(load_file(path / weight_map[name])[name])}, other)
    _, sharded = load(path)
    for a, b in zip(single, sharded, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_shard_is_named(copy):
    path = copy()
    shard(path, 2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(path)


def test_a_shard_without_its_tensor_is_named(copy):
    path = copy()
    shard(path, 2)
    file = path / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"model-00001-of-00002.safetensors lacks '{lost}'"):
        load(path)


def test_an_index_cannot_point_out_of_the_directory(copy):
    path = copy()
    weight_map = shard(path, 1)
    outside = {name: f"../{file}" for name, file in weight_map.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(CheckpointError, match=r"outside the checkpoint's directory"):
        load(path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors(copy, keep):
    path = copy()
    file = path / "model.safetensors"
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(path)


def test_a_missing_tensor_is_named(copy):
    path = copy()
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of \d+ tensors, first 'model.layers.1.mlp.up_proj.weight'"
    ):
        load(path)


def test_a_left_over_tensor_is_named(copy):
    path = copy()
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, "model.layers.0.adapter.weight": np.zeros(3, np.float32)}, path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"no place for, first 'model\.layers\.0\.adapter\.weight'"):
        load(path)


def test_a_wrong_shape_is_named(copy):
    path = copy()
    edit_config(path, intermediate_size=81)
    with pytest.raises(CheckpointError, match=r"shape \(48, 80\), but the config asks for \(48, 81\)"):
        load(path)


def test_integer_weights_are_refused(copy):
    path = copy()
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.int8)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}' is int8"):
        load(path)


def test_tied_embeddings_ignore_a_second_copy(copy):
    path = copy()
    _, tied = load(path)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": np.zeros_like(embedding)}, path / "model.safetensors")
    _, twice = load(path)
    assert len(tied) == len(twice)
    for a, b in zip(tied, twice, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_untied_head_is_required(copy):
    path = copy()
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"first 'lm_head\.weight'"):
        load(path)


def test_unknown_architecture(copy):
    path = copy()
    edit_config(path, model_type="perceptron", architectures=["PerceptronForCausalLM"])
    (path / "model.safetensors").unlink()  # what is not supported is said before what is missing
    with pytest.raises(
        CheckpointError,
        match=r"'perceptron' .architecture PerceptronForCausalLM. is not supported; known: .*llama",
    ):
        LLM(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_malformed_config(copy, content: str):
    path = copy()
    (path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(path)


def test_a_config_without_a_needed_field(copy):
    path = copy()
    config = json.loads((path / "config.json").read_text())
    del config["hidden_size"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'hidden_size'"):
        LLM(path)


def test_what_is_no_model_says_what_was_looked_for(tmp_path: Path):
    for nothing in ("", " "):
        with pytest.raises(CheckpointError, match="the model name is empty"):
            open_checkpoint(nothing)
    with pytest.raises(CheckpointError, match=r"no preset .*smollm2-135m"):
        open_checkpoint("no-such-model")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a \.gguf"):
        open_checkpoint(tmp_path / "weights.bin")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"pickled weights are not read"):
        open_checkpoint(tmp_path)


# GGUF


def to_gguf(path: Path, oracle: str = "llama_tied", *, quantised: str | None = None, **metadata) -> Path:
    """Writes an oracle's checkpoint as llama.cpp's converter does: its names, its row order in q and k.

    oracle: one of tests/oracles, or tiny-llama.
    quantised: a type for the matrices, by name; the embedding is Q8_0 then.
    """
    if oracle == "tiny-llama":
        random = RandomCheckpoint(oracle)
        config, tensors = random.config, {name: random.read(name) for name in random.names()}
    else:
        config = json.loads((DIRECTORY / oracle / "config.json").read_text())
        tensors = load_file(DIRECTORY / oracle / "model.safetensors")
    arch = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}.get(config["model_type"], "llama")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    for key, value in metadata.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        stacked = {re.sub(r"experts\.\d+\.", "experts.", n): [] for n in tensors if ".experts." in n}
        for name, parts in stacked.items():
            for expert in range(config["num_local_experts"]):
                parts.append(tensors.pop(name.replace("experts.", f"experts.{expert}.")))
        tensors |= {name: np.stack(parts) for name, parts in stacked.items()}
    for name, tensor in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        tensor = np.ascontiguousarray(tensor, dtype=np.float32)
        if quantised is None or tensor.ndim == 1:
            writer.add_tensor(gguf_name, tensor)
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if "embd" in gguf_name else quantised]
        writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "qwen3_moe"])
def test_gguf_gives_the_same_model(tmp_path: Path, name: str):
    oracle = load_oracle(name)
    llm = LLM(to_gguf(tmp_path / "m.gguf", name), dtype="float32", warm_up=False, max_num_seqs=1)
    error = np.abs(llm.logits(oracle.tokens[0].tolist()) - oracle.logits[0]).max()
    assert error < 2e-4 * oracle.logits.std()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_in_blocks_are_the_same_weights(tmp_path: Path, kind: str):
    """Every value of a packed matrix is the one that gguf dequantises, and the model computes the same with either."""
    file = to_gguf(tmp_path / "m.gguf", "tiny-llama", quantised=kind)
    packed = LLM(file, weights="packed", warm_up=False, max_num_seqs=2)
    dense = LLM(file, weights="dense", warm_up=False, max_num_seqs=2)
    count = 0
    for compact, plain in zip(packed.params, dense.params, strict=True):
        if isinstance(compact, BlockWeights):
            count += 1
            np.testing.assert_allclose(compact.dense(), plain, rtol=3e-7, atol=1e-7 * np.abs(plain).max())
        else:
            np.testing.assert_array_equal(compact, plain)
    assert count == sum(len(plain.shape) > 1 for plain in dense.params)
    tokens = np.random.default_rng(0).integers(0, 512, 40).tolist()
    expected = dense.logits(tokens)
    assert np.abs(packed.logits(tokens) - expected).max() < 1e-5 * expected.std()
    params = SamplingParams(max_tokens=12, temperature=0)
    ids = [llm.generate([tokens, tokens[:5]], params) for llm in (packed, dense)]
    assert [o.outputs[0].token_ids for o in ids[0]] == [o.outputs[0].token_ids for o in ids[1]]


def test_which_weights_stay_in_blocks(tmp_path: Path):
    file = to_gguf(tmp_path / "m.gguf", "tiny-llama", quantised="Q8_0")
    for asked, dtype, packed in (
        ("auto", None, True),
        ("auto", "float32", False),
        ("dense", None, False),
        ("packed", "bfloat16", True),
    ):
        llm = LLM(file, dtype=dtype, weights=asked, warm_up=False, max_num_seqs=1)
        assert any(isinstance(p, BlockWeights) for p in llm.params) == packed, (asked, dtype)
    with pytest.raises(ConfigError, match=r"stores none in blocks of codes"):
        LLM(to_gguf(tmp_path / "plain.gguf"), weights="packed", warm_up=False)
    with pytest.raises(ConfigError, match=r"weights must be one of auto, packed, dense"):
        LLM(file, weights="int4", warm_up=False)


def test_blocks_that_do_not_have_their_bytes(tmp_path: Path):
    file = to_gguf(tmp_path / "m.gguf", "tiny-llama", quantised="Q4_1")
    checkpoint = GGUFCheckpoint(file)
    name = "model.layers.0.mlp.up_proj.weight"
    place = checkpoint._tensors[name]
    checkpoint._tensors[name] = dataclasses.replace(place, num_bytes=place.num_bytes - 20)
    with pytest.raises(
        CheckpointError, match=r"'model.layers.0.mlp.up_proj.weight' of type Q4_1 does not have"
    ):
        checkpoint.read_blocks(name)


def test_unpermute_undoes_llama_cpp_s_row_order():
    weights = np.arange(24.0).reshape(12, 2)
    permuted = weights.reshape(3, 2, 2, 2).swapaxes(1, 2).reshape(12, 2)
    assert not np.array_equal(permuted, weights)
    np.testing.assert_array_equal(unpermute(permuted, 3), weights)


def test_gguf_heads_that_turn_in_part(tmp_path: Path):
    for width, served in ((16, True), (8, False)):
        metadata: dict[str, Any] = {"llama.rope.dimension_count": width}
        checkpoint = GGUFCheckpoint(to_gguf(tmp_path / "m.gguf", **metadata))
        if served:
            assert checkpoint.model_config().head_dim == 16
        else:
            with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5"):
                checkpoint.model_config()


@pytest.mark.parametrize("keep", [0, 3, 200, 0.5, -64])
def test_truncated_gguf(tmp_path: Path, keep):
    file = to_gguf(tmp_path / "m.gguf")
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"m.gguf is truncated.*: download it again") as caught:
        GGUFCheckpoint(file)
    assert not re.search("array|reshape|index|dtype|axis", str(caught.value).replace(str(file), ""))


def test_a_gguf_with_a_tensor_twice(tmp_path: Path):
    file = to_gguf(tmp_path / "m.gguf")
    content = file.read_bytes()
    assert content.count(b"blk.0.attn_k.weight") == 1
    file.write_bytes(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(CheckpointError, match=r"m\.gguf is damaged: .*blk\.0\.attn_q\.weight"):
        GGUFCheckpoint(file)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"PK\3\4 and more", "is not a GGUF file: it begins with b'PK"),
        (b"GGUF\1\0\0\0", "is of GGUF version 1; known: 2, 3"),
    ],
)
def test_what_is_no_gguf(tmp_path: Path, head: bytes, says: str):
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(CheckpointError, match=says):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_gguf_of_another_architecture(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ssm_a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported"):
        GGUFCheckpoint(tmp_path / "m.gguf")


# What a checkpoint decides


def test_serving_dtype():
    assert serving_dtype(None, "bfloat16") == jnp.bfloat16
    assert serving_dtype(None, "float16") == jnp.float32
    assert serving_dtype("float32", "bfloat16") == jnp.float32
    with pytest.raises(ConfigError, match=r"'int4' is not supported"):
        serving_dtype("int4", "bfloat16")


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({}, {2}), ({"eos_token_id": 7}, {7}), ({"eos_token_id": [7, 8]}, {7, 8})],
)
def test_generation_config_beats_config_on_what_ends_a_text(generation_config: dict, expected: set):
    checkpoint = HuggingFaceCheckpoint(DIRECTORY / "llama3")
    config = family_for(checkpoint.config).config_from_hf(checkpoint.config)
    assert end_ids(config, generation_config, None) == expected


def test_tiny_presets_are_the_same_everywhere():
    a, b = open_checkpoint("tiny-llama"), open_checkpoint("tiny-llama")
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(a.read(name), b.read(name))
    assert not np.array_equal(a.read(name), a.read(name.replace("1", "0")))

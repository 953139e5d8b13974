"""Safetensors headers: what is read from well-formed files, and which damage is told from which."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_checkpoint import write_checkpoint

from jaxinfer.errors import CheckpointError
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.safetensors_index import read_index


def write(path: Path, header: str | dict, data: bytes) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    return path


def entry(start: int, stop: int, dtype: str = "F32", shape: list | None = None) -> dict:
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int8, np.uint8, np.bool_]


@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_what_the_library_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, tensors):
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in tensors.items()}
    file = tmp_path_factory.mktemp("st") / "a.safetensors"
    save_file(values, file, metadata={"format": "np"})
    index = read_index(file)
    assert index.keys() == values.keys()
    for name, value in values.items():
        read = index[name].read()
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(read, value)
        for start in range(len(value) if value.ndim else 0):
            np.testing.assert_array_equal(index[name].read(start, start + 1), value[start : start + 1])


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        ("[]", 0, "its header is not a JSON object"),
        ("{", 0, "its header is not JSON"),
        ({"a": entry(0, 8)}, 7, "tensor 'a' ends past its"),
        ({"a": entry(0, 8)}, 9, "its header describes"),
        ({"a": entry(0, 8, shape=[3])}, 8, r"tensor 'a' has 8 bytes for shape \(3,\) of F32"),
        ({"a": entry(0, 8, shape=[-2])}, 8, "'a' is not described as the format asks"),
        ({"a": entry(0, 8, shape=[2.0])}, 8, "'a' is not described as the format asks"),
        ({"a": {"dtype": "F32"}}, 8, "'a' is not described as the format asks"),
        ({"a": entry(4, 8)}, 8, "'a' does not begin where the one before it ends"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' does not begin where"),
        ({"a": entry(0, 8, dtype="F4")}, 8, "'a' is F4, which is not supported; known: F64, F32"),
        ('{{"a": {}, "a": {}}}'.format(*[json.dumps(entry(0, 8))] * 2), 8, "holds tensor 'a' twice"),
    ],
)
def test_files_that_do_not_keep_to_the_format(tmp_path: Path, header, size, says):
    file = write(tmp_path / "a.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=rf"a\.safetensors.*{says}"):
        read_index(file)


def test_an_index_that_names_a_tensor_twice(tmp_path: Path):
    path = write_checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    twice = '"model.norm.weight": "model-1.safetensors"'
    index = path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{{twice}, {twice}}}}}')
    with pytest.raises(CheckpointError, match=r"index\.json names 'model\.norm\.weight' twice"):
        open_checkpoint(path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_an_index_without_a_map(tmp_path: Path, weight_map):
    path = write_checkpoint(tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json has no 'weight_map' of file names"):
        open_checkpoint(path)

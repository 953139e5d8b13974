"""Hugging Face model directories: config.json and safetensors, in one file or sharded with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint, Task
from jaxinfer.weights.companions import copy_companions, open_tokenizer
from jaxinfer.weights.safetensors_index import RepeatedKey, StoredTensor, read_index, unique_keys

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TASK_BYTES = 16 << 20  # one thread's piece of work
_CAST_BYTES = 1 << 20  # read at once where it is cast, so that it is still in the cache then


class HuggingFaceCheckpoint(Checkpoint):
    """A directory with config.json and safetensors files. Pickled weights (.bin, .pt) are never read.

    Where there is an index it alone says which shard a tensor comes from: other copies of it, and tensors it does not name,
    are of no account (checkpoints put together from older ones have such).
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = (
            read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        )
        self.stored = _stored_tensors(path)
        self.stored_dtype = self._stored_dtype()

    def _stored_dtype(self) -> str:
        """What config.json says, else the dtype of most of the bytes; weights in float64 are rounded to float32."""
        parts = (self.config.get("text_config") or {}, self.config)
        told = [part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
        counted: dict[str, int] = {"float32": 0, "bfloat16": 0, "float16": 0}
        for tensor in self.stored.values():
            if str(tensor.dtype) in counted:
                counted[str(tensor.dtype)] += tensor.num_bytes
        name = told[0] if told else max(counted, key=lambda dtype: counted[dtype])
        return "float32" if name == "float64" else name

    def names(self) -> Set[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.stored[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self.stored[name].read()

    def fill(self, name: str, out: np.ndarray, start: int = 0) -> list[Task]:
        tensor = self.stored[name]
        ranges = row_ranges(len(out), len(out) * tensor.row_bytes)
        return [partial(_copy, tensor, start + first, out[first:last]) for first, last in ranges]

    def save_companions(self, folder: Path) -> None:
        copy_companions(self.path, folder)

    def tokenizer(self) -> Tokenizer | None:
        return open_tokenizer(self.path)


def row_ranges(
    rows: int, num_bytes: int, multiple: int = 1, size: int = _TASK_BYTES
) -> list[tuple[int, int]]:
    """Splits `rows` of `num_bytes` in all into ranges of about `size` bytes, which begin at multiples of `multiple`."""
    step = max(rows * size // max(num_bytes, 1) // multiple, 1) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _copy(tensor: StoredTensor, start: int, out: np.ndarray) -> None:
    if out.dtype == tensor.dtype and out.flags.c_contiguous:
        tensor.read_into(out, start)
        return
    for first, last in row_ranges(len(out), len(out) * tensor.row_bytes, size=_CAST_BYTES):
        out[first:last] = tensor.read(start + first, start + last)


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    index = path / _INDEX
    if index.exists():
        return _indexed_tensors(index)
    single = path / _SINGLE
    if not single.exists():
        others = sorted(path.glob("*.safetensors"))
        if len(others) != 1:
            rest = (
                f", and {len(others)} other safetensors files" if others else "; pickled weights are not read"
            )
            raise CheckpointError(f"{path} has neither {_SINGLE} nor {_INDEX}{rest}")
        single = others[0]
    return read_index(single)


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index, unique=True).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of file names: download it again")
    shards = {}
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if file.parent != index.parent:
            raise CheckpointError(f"{index} names {file}, which is outside the checkpoint's directory")
        shards[name] = read_index(file)
    lost = sorted(name for name, file in weight_map.items() if name not in shards[file])
    if lost:
        file = index.parent / weight_map[lost[0]]
        raise CheckpointError(f"{file} lacks {lost[0]!r}, which {_INDEX} says it holds: download it again")
    return {name: shards[file][name] for name, file in weight_map.items()}


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; CheckpointError when it is missing or malformed.

    unique: also when a key is there twice, instead of taking the last one.
    """
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys if unique else None
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model directory needs it") from None
    except RepeatedKey as e:
        raise CheckpointError(f"{path} names {e.key!r} twice: only one of the two can be meant") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON ({e})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value

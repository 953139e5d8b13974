"""Reads what a safetensors file says about itself: which tensors it holds and where (huggingface/safetensors, README, "Format")."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError

_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `num_bytes` bytes of `file` from `offset` on, row after row."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along axis 0."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) along axis 0; all of it without them. CheckpointError when the file is shorter than it was."""
        rows = self.shape[:1] if stop is None else (stop - start,)
        out = np.empty((*rows, *self.shape[1:]), self.dtype)
        self.read_into(out, start)
        return out

    def read_into(self, out: np.ndarray, start: int = 0) -> None:
        """Fills a C-contiguous array of the stored dtype with as many rows from `start` on. Threads may read at once."""
        view = memoryview(out.reshape(-1).view(np.uint8))
        position = self.offset + start * self.row_bytes
        try:
            with self.file.open("rb", buffering=0) as file:
                while len(view):
                    count = os.preadv(file.fileno(), [view], position)
                    if count == 0:
                        raise CheckpointError(f"{self.file} became shorter while it was read")
                    view, position = view[count:], position + count
        except OSError as e:
            raise CheckpointError(f"{self.file} cannot be read: {e.strerror}") from e


def read_index(file: Path) -> dict[str, StoredTensor]:
    """Tensors by name. Raises CheckpointError when the file is missing, truncated, or does not keep to the format."""
    if not file.exists():
        raise CheckpointError(f"{file} is missing: download it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise _damaged(file, f"its header does not fit in its {size} bytes")
            header = json.loads(stream.read(length), object_pairs_hook=unique_keys)
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror}") from e
    except RepeatedKey as e:
        raise CheckpointError(f"{file} holds tensor {e.key!r} twice: download it again") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise _damaged(file, f"its header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {name: _place(file, data, name, entry) for name, entry in header.items()}
    _check_extent(file, data, size, tensors)
    return tensors


def _place(file: Path, data: int, name: str, entry: Any) -> StoredTensor:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            type(n) is int and n >= 0 for n in shape
        ):
            pass
        case _:
            raise _damaged(file, f"tensor {name!r} is not described as the format asks")
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise CheckpointError(
            f"{file}: tensor {name!r} is {code}, which is not supported; known: {', '.join(_DTYPES)}"
        )
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"tensor {name!r} has {stop - start} bytes for shape {tuple(shape)} of {code}")
    return StoredTensor(file, dtype, tuple(shape), data + start, stop - start)


def _check_extent(file: Path, data: int, size: int, tensors: dict[str, StoredTensor]) -> None:
    """The tensors' bytes follow each other and fill the file: a short one is named, and so is a hole or an overlap."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise _damaged(file, f"tensor {name!r} does not begin where the one before it ends")
        end += tensor.num_bytes
        if end > size:
            raise _damaged(file, f"tensor {name!r} ends past its {size} bytes")
    if end != size:
        raise _damaged(file, f"it has {size} bytes and its header describes {end}")


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or not a safetensors file ({reason}): download it again")


class RepeatedKey(ValueError):
    """A JSON object that gives one key two values."""

    def __init__(self, key: str):
        super().__init__(f"key {key!r} is there twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object_pairs_hook for json.loads that refuses what a dict would silently overwrite."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RepeatedKey(key)
        result[key] = value
    return result

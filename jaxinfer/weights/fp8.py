"""FP8 checkpoints in DeepSeek-V3's style: float8_e4m3fn matrices with a scale for each block, shown as plain matrices."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.weights.checkpoint import Task
from jaxinfer.weights.safetensors import HuggingFaceCheckpoint, row_ranges
from jaxinfer.weights.safetensors_index import StoredTensor

_SCALE = "_scale_inv"  # X.weight has X.weight_scale_inv
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_VALUES = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)
_SUPPORTED = "supported: fmt 'e4m3', activation_scheme 'dynamic', and a weight_block_size such as [128, 128]"


class FP8Checkpoint(HuggingFaceCheckpoint):
    """A directory whose quantization_config has quant_method "fp8": X.weight = codes * the scale of the block they are in.

    Blocks lie on a grid from the first row and column on; those at the edges may be partial. Served in bfloat16 unless the user
    says otherwise.
    """

    def __init__(self, path: Path, quantization: Mapping[str, Any]):
        self._block = _block_size(path, quantization)
        super().__init__(path)
        self.stored_dtype = "bfloat16"
        self._scales = {
            name.removesuffix(_SCALE): tensor for name, tensor in self.stored.items() if name.endswith(_SCALE)
        }
        self._names = {name for name in self.stored if not name.endswith(_SCALE)}
        self._check_scales()

    def _check_scales(self) -> None:
        for name in self._names:
            tensor = self.stored[name]
            if tensor.dtype == _FLOAT8 and name not in self._scales:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name!r} is {_FLOAT8}, but its scales {name + _SCALE!r} are missing"
                )
        for name, scale in self._scales.items():
            self._check_scale(name, scale)

    def _check_scale(self, name: str, scale: StoredTensor) -> None:
        tensor = self.stored.get(name)
        if tensor is None:
            raise CheckpointError(f"{scale.file} holds scales {name + _SCALE!r}, but there is no {name!r}")
        if tensor.dtype != _FLOAT8 or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has scales, but is {tensor.dtype} of shape {tensor.shape} "
                f"instead of a matrix of {_FLOAT8}"
            )
        if scale.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"{scale.file}: scales {name + _SCALE!r} are {scale.dtype}; supported: {', '.join(map(str, _SCALE_DTYPES))}"
            )
        expected = tuple(-(-n // b) for n, b in zip(tensor.shape, self._block, strict=True))
        if scale.shape != expected:
            raise CheckpointError(
                f"{scale.file}: scales {name + _SCALE!r} have shape {scale.shape}, but {tensor.shape} in blocks of "
                f"{self._block} needs {expected}"
            )

    def names(self) -> Set[str]:
        return self._names

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._scales else super().dtype(name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._scales:
            return super().read(name)
        out = np.empty(self.shape(name), np.float32)
        for task in self.fill(name, out):
            task()
        return out

    def fill(self, name: str, out: np.ndarray, start: int = 0) -> list[Task]:
        if name not in self._scales:
            return super().fill(name, out, start)
        ranges = row_ranges(len(out), out.size * np.dtype(np.float32).itemsize, self._block[0])
        return [partial(self._dequantise, name, start + first, out[first:last]) for first, last in ranges]

    def _dequantise(self, name: str, start: int, out: np.ndarray) -> None:
        height, width = self._block
        stop = start + len(out)
        values = np.take(_VALUES, self.stored[name].read(start, stop).view(np.uint8))
        first = start // height
        scales = self._scales[name].read(first, -(-stop // height)).astype(np.float32)
        for block, row in enumerate(scales, first):
            rows = slice(max(block * height - start, 0), (block + 1) * height - start)
            values[rows] *= np.repeat(row, width)[: values.shape[1]]
        out[...] = values


def _block_size(path: Path, quantization: Mapping[str, Any]) -> tuple[int, int]:
    for key, known in (("fmt", (None, "e4m3")), ("activation_scheme", (None, "dynamic"))):
        if quantization.get(key) not in known:
            raise CheckpointError(
                f"{path}: FP8 with {key} {quantization[key]!r} is not supported; {_SUPPORTED}"
            )
    match quantization.get("weight_block_size"):
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case other:
            raise CheckpointError(
                f"{path}: FP8 with weight_block_size {other!r} is not supported; {_SUPPORTED}"
            )

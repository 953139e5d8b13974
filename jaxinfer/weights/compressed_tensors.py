"""INT4 checkpoints of the compressed-tensors library in its "pack-quantized" format (Kimi K2.5's), shown as plain matrices."""

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
from pallas_kernels.linear import BLOCK, BlockKind, BlockWeights

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"  # X.weight is X.weight_packed and so on
_REFUSED = ("_zero_point", "_g_idx")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SCALE_DTYPES = (_BFLOAT16, np.dtype(np.float16), np.dtype(np.float32))
_KIND: BlockKind = "int4_symmetric"
_SUPPORTED = "supported: format 'pack-quantized' with symmetric int weights of 4 bits in groups of 32, activations left alone"
# What quantization_config may say; other keys do not change the values.
_WEIGHTS = {
    "num_bits": (4,),
    "type": (None, "int"),
    "symmetric": (None, True),
    "strategy": (None, "group"),
    "group_size": (BLOCK,),
    "actorder": (None, False, "weight", "static"),  # the others come with an order of columns
    "dynamic": (None, False),
    "block_structure": (None,),
}
_GROUP = {"format": (None, "pack-quantized"), "input_activations": (None,), "output_activations": (None,)}
_TOP = {"format": ("pack-quantized",), "kv_cache_scheme": (None,), "transform_config": (None, {})}


class PackedCheckpoint(HuggingFaceCheckpoint):
    """A directory whose quantization_config has quant_method "compressed-tensors", of the one kind that `_SUPPORTED` says.

    X.weight_packed [N, K / 8] int32 holds eight codes a word, the first in the lowest bits; X.weight_scale [N, K / 32] one scale a
    group; X.weight_shape is [N, K]. A value is (code - 8) * scale.
    """

    def __init__(self, path: Path, quantization: Mapping[str, Any]):
        _check_config(path, quantization)
        super().__init__(path)
        self._packed = {
            name.removesuffix(_PACKED): tensor
            for name, tensor in self.stored.items()
            if name.endswith("weight" + _PACKED)
        }
        self._names = set(self._packed)
        for name, tensor in self.stored.items():
            self._sort(name, tensor)
        for name in self._packed:
            self._check_parts(name)

    def _sort(self, name: str, tensor: StoredTensor) -> None:
        """Takes a stored tensor for a plain one, or for a part of a packed one."""
        base, mark, kind = name.rpartition("weight")
        base += mark
        if kind in (_SCALE, _SHAPE) and base not in self._packed:
            raise CheckpointError(f"{tensor.file} holds {name!r}, but {base + _PACKED!r} is missing")
        if kind in _REFUSED:
            raise CheckpointError(f"{tensor.file}: tensor {name!r} is not supported; {_SUPPORTED}")
        if name in self._packed:
            raise CheckpointError(f"{tensor.file} holds {name!r}, which is also there as {name + _PACKED!r}")
        if kind not in (_PACKED, _SCALE, _SHAPE):
            self._names.add(name)

    def _check_parts(self, name: str) -> None:
        packed = self._packed[name]
        for part in (_SCALE, _SHAPE):
            if name + part not in self.stored:
                raise CheckpointError(
                    f"{packed.file} holds {name + _PACKED!r}, but {name + part!r} is missing"
                )
        if packed.dtype != np.int32 or len(packed.shape) != 2 or packed.shape[1] * 8 % BLOCK:
            raise CheckpointError(
                f"{packed.file}: {name + _PACKED!r} is {packed.dtype} of shape {packed.shape}, not int32 words of groups of {BLOCK}"
            )
        rows, columns = self.shape(name)
        scale = self.stored[name + _SCALE]
        if scale.dtype not in _SCALE_DTYPES or scale.shape != (rows, columns // BLOCK):
            raise CheckpointError(
                f"{scale.file}: {name + _SCALE!r} is {scale.dtype} of shape {scale.shape}, but {(rows, columns)} in groups of "
                f"{BLOCK} needs {(rows, columns // BLOCK)} of {', '.join(map(str, _SCALE_DTYPES))}"
            )
        shape = self.stored[name + _SHAPE]
        if shape.dtype not in (np.int32, np.int64) or shape.shape != (2,):
            raise CheckpointError(
                f"{shape.file}: {name + _SHAPE!r} is {shape.dtype} of shape {shape.shape}, not two integers"
            )

    def names(self) -> Set[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        rows, words = self._packed[name].shape
        return rows, words * 8

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._packed else super().dtype(name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return super().read(name)
        out = np.empty(self.shape(name), np.float32)
        for task in self.fill(name, out):
            task()
        return out

    def fill(self, name: str, out: np.ndarray, start: int = 0) -> list[Task]:
        if name not in self._packed:
            return super().fill(name, out, start)
        ranges = self._ranges(name, len(out))
        return [
            partial(self._check_shape, name),
            *(partial(self._dequantise, name, start + first, out[first:last]) for first, last in ranges),
        ]

    def block_kind(self, name: str) -> BlockKind | None:
        # Scales of another type than the blocks' would lose bits.
        return _KIND if name in self._packed and self.stored[name + _SCALE].dtype == _BFLOAT16 else None

    def read_blocks(self, name: str) -> BlockWeights:
        parts = BlockWeights.abstract(_KIND, self.shape(name))
        out = BlockWeights(*(np.empty(part.shape, part.dtype) for part in parts))
        for task in self.fill_blocks(name, out):
            task()
        return out

    def fill_blocks(self, name: str, out: BlockWeights, start: int = 0) -> list[Task]:
        ranges = self._ranges(name, len(out.codes))
        return [
            partial(self._check_shape, name),
            *(partial(self._repack, name, start + a, *(part[a:b] for part in out)) for a, b in ranges),
        ]

    def _ranges(self, name: str, rows: int) -> list[tuple[int, int]]:
        return row_ranges(rows, rows * self.shape(name)[1] * np.dtype(np.float32).itemsize)

    def _check_shape(self, name: str) -> None:
        """Nothing else needs X.weight_shape, but if it disagrees, the rest is not what it seems."""
        shape = self.stored[name + _SHAPE]
        told = tuple(shape.read().tolist())
        if told != self.shape(name):
            raise CheckpointError(
                f"{shape.file}: {name + _SHAPE!r} is {told}, but the packed words hold {self.shape(name)}"
            )

    def _read(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [rows, groups, 16], where byte j has codes 2j (low half) and 2j + 1, and scales [rows, groups]."""
        words = self._packed[name].read(start, stop)
        data = words.view(np.uint8).reshape(
            stop - start, -1, BLOCK // 2
        )  # of little-endian words, as all our hosts'
        return data, self.stored[name + _SCALE].read(start, stop)

    def _dequantise(self, name: str, start: int, out: np.ndarray) -> None:
        data, scales = self._read(name, start, start + len(out))
        values = np.empty((*data.shape, 2), np.float32)
        np.subtract(data & 15, 8, out=values[..., 0], dtype=np.float32)
        np.subtract(data >> 4, 8, out=values[..., 1], dtype=np.float32)
        values *= scales.astype(np.float32)[..., None, None]
        out[...] = values.reshape(out.shape)

    def _repack(self, name: str, start: int, codes: np.ndarray, scales: np.ndarray) -> None:
        """The same codes in BlockWeights' order: byte j has codes j and 16 + j of its block."""
        data, stored_scales = self._read(name, start, start + len(codes))
        low, high = data[..., :8], data[..., 8:]
        out = codes.reshape(*data.shape[:2], 8, 2)
        out[..., 0] = (low & 15) | (high << 4)
        out[..., 1] = (low >> 4) | (high & 0xF0)
        scales[...] = stored_scales[..., None]


def _check_config(path: Path, quantization: Mapping[str, Any]) -> None:
    _check_fields(path, quantization, _TOP, "")
    _check_fields(
        path, quantization.get("sparsity_config") or {}, {"format": (None, "dense")}, "sparsity_config."
    )
    groups = quantization.get("config_groups") or {}
    _check_fields(path, groups, {}, "config_groups.")
    for name, group in groups.items():
        _check_fields(path, group, _GROUP, f"config_groups.{name}.")
        _check_fields(path, group.get("weights") or {}, _WEIGHTS, f"config_groups.{name}.weights.")


def _check_fields(path: Path, fields: Any, known: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    """Raises CheckpointError unless `fields` says of each key something known."""
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{path}: quantization_config.{prefix.rstrip('.')} is not a JSON object")
    for key, values in known.items():
        if fields.get(key) not in values:
            raise CheckpointError(
                f"{path}: compressed-tensors with {prefix}{key}={fields.get(key)!r} is not supported; {_SUPPORTED}"
            )

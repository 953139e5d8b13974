"""GGUF's block formats whose codes are used as they are: the same bytes, scales apart from codes (ggml's ggml-common.h)."""

from __future__ import annotations

import gguf
import numpy as np

from pallas_kernels.linear import BLOCK, BlockKind, BlockWeights

_Type = gguf.GGMLQuantizationType
_LAYOUTS = {
    _Type.Q4_0: np.dtype([("scale", "<f2"), ("codes", "u1", BLOCK // 2)]),
    _Type.Q4_1: np.dtype([("scale", "<f2"), ("offset", "<f2"), ("codes", "u1", BLOCK // 2)]),
    _Type.Q8_0: np.dtype([("scale", "<f2"), ("codes", "i1", BLOCK)]),
}
_KINDS: dict[int, BlockKind] = {_Type.Q4_0: "int4", _Type.Q4_1: "int4", _Type.Q8_0: "int8"}


def kind_of(type_: int) -> BlockKind | None:
    """How BlockWeights holds a gguf.GGMLQuantizationType, None if it cannot."""
    return _KINDS.get(type_)


def split(data: np.ndarray, type_: int, shape: tuple[int, int]) -> BlockWeights:
    """A tensor's bytes as codes and scales (copies). ValueError when the bytes are not those of `shape`."""
    layout = _LAYOUTS[_Type(type_)]
    rows, width = shape
    blocks = np.asarray(data).reshape(rows, width // BLOCK, layout.itemsize).view(layout)[..., 0]
    scales = [blocks["scale"]]
    if type_ == _Type.Q4_0:  # code 8 is zero
        scales.append(np.float16(-8) * blocks["scale"])
        if not np.isfinite(scales[1]).all():
            raise ValueError("a scale of Q4_0 is too large")
    elif type_ == _Type.Q4_1:
        scales.append(blocks["offset"])
    return BlockWeights(blocks["codes"].reshape(rows, -1), np.stack(scales, -1))

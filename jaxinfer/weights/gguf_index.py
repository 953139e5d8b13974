"""What a GGUF file says about itself: its metadata and where its tensors lie, remembered between starts.

gguf's reader makes a NumPy view of every string of the vocabulary, which takes seconds; its result is kept in the user cache under
the file's path, size and time of change.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import gguf
import msgpack

from jaxinfer.cachedir import cache_root
from jaxinfer.errors import CheckpointError

_VERSION = 1  # of the cached form
_MAGIC = b"GGUF"
_READABLE = (2, 3)  # versions of the format
# What gguf's reader meets in a file whose end is missing; their words are about NumPy's arrays, not about the file.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's place in the file; shape as NumPy counts, type as in gguf.GGMLQuantizationType, offset and size in bytes."""

    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFIndex:
    """Metadata by key as Python values, and tensors by their GGUF names."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_index(path: Path) -> GGUFIndex:
    """Index of a GGUF file. Raises CheckpointError when it is missing, truncated, or something else."""
    try:
        stat = path.stat()
    except OSError:
        raise CheckpointError(f"{path} does not exist") from None
    identity = repr((_VERSION, str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    kept = cache_root() / "gguf" / (hashlib.sha256(identity.encode()).hexdigest()[:32] + ".msgpack")
    index = _load(kept)
    if index is None:
        index = _parse(path, stat.st_size)
        _keep(index, kept)
    return index


def _parse(path: Path, size: int) -> GGUFIndex:
    _check_header(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            t.name: TensorPlace(
                tuple(int(n) for n in reversed(t.shape)),
                int(t.tensor_type),
                int(t.data_offset),
                int(t.n_bytes),
            )
            for t in reader.tensors
        }
    except _DAMAGE as e:
        if "duplicated tensor" in str(e):  # which the reader names
            raise CheckpointError(f"{path} is damaged: {e}: download it again") from e
        raise CheckpointError(
            f"{path} is truncated or damaged (it has {size} bytes): download it again"
        ) from e
    for name, place in tensors.items():
        if place.offset + place.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends past the file's {size} bytes: download it again"
            )
    return GGUFIndex(metadata, tensors)


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from None
    if head[:4] != _MAGIC[: len(head)]:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {head[:4]!r} instead of {_MAGIC!r}")
    version = int.from_bytes(head[4:], "little")
    if len(head) == 8 and version not in _READABLE:
        raise CheckpointError(
            f"{path} is of GGUF version {version}; known: {', '.join(map(str, _READABLE))} (little-endian)"
        )


def _load(kept: Path) -> GGUFIndex | None:
    try:
        metadata, tensors = msgpack.unpackb(kept.read_bytes())
        return GGUFIndex(
            metadata, {name: TensorPlace(tuple(shape), *rest) for name, (shape, *rest) in tensors.items()}
        )
    except (OSError, ValueError, TypeError):
        return None  # not there, or torn: it is made again


def _keep(index: GGUFIndex, kept: Path) -> None:
    content = msgpack.packb([index.metadata, {name: astuple(place) for name, place in index.tensors.items()}])
    assert isinstance(content, bytes)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, kept)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else

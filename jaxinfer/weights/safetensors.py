"""Hugging Face model directories: config.json and safetensors, in one file or sharded with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HuggingFaceCheckpoint(Checkpoint):
    """A directory with config.json and safetensors files. Pickled weights (.bin, .pt) are never read."""

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = (
            read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        )
        self._files: dict[str, Path] = {}  # tensor name: the shard that owns it
        self._open: dict[Path, Any] = {}
        for name, file in self._owners():
            self._files[name] = file
        text_config = self.config.get("text_config", self.config)
        dtype = text_config.get("dtype") or text_config.get("torch_dtype") or self.config.get("torch_dtype")
        self.stored_dtype = dtype or "float32"

    def _owners(self) -> list[tuple[str, Path]]:
        index = self.path / _INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, Mapping):
                raise CheckpointError(f"{index} has no 'weight_map': download it again")
            owners = [(name, self.path / file) for name, file in weight_map.items()]
            for file in sorted({f for _, f in owners}):
                if file.parent != self.path:
                    raise CheckpointError(
                        f"{index} names {file}, which is outside the checkpoint's directory"
                    )
                present = self._names_in(file)
                lost = sorted(n for n, f in owners if f == file and n not in present)
                if lost:
                    raise CheckpointError(
                        f"{file} lacks {lost[0]!r}, which {_INDEX} says it holds: download it again"
                    )
            return owners
        single = self.path / _SINGLE
        if not single.exists():
            others = sorted(self.path.glob("*.safetensors"))
            if len(others) != 1:
                raise CheckpointError(
                    f"{self.path} has neither {_SINGLE} nor {_INDEX}"
                    + (
                        f", and {len(others)} other safetensors files"
                        if others
                        else "; pickled weights are not read"
                    )
                )
            single = others[0]
        return [(name, single) for name in self._names_in(single)]

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            if not file.exists():
                raise CheckpointError(f"{file} is missing: download it again")
            try:
                self._open[file] = safe_open(file, framework="numpy")
            except (SafetensorError, OSError) as e:
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file ({e}): download it again"
                ) from e
        return self._open[file]

    def _names_in(self, file: Path) -> set[str]:
        return set(self._handle(file).keys())

    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(self._files[name]).get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        file = self._files[name]
        try:
            return self._handle(file).get_tensor(name)
        except (SafetensorError, OSError, TypeError) as e:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read ({e})") from e

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_directory(self.path) if (self.path / "tokenizer.json").exists() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; CheckpointError when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model directory needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON ({e})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value

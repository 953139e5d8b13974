"""Turns what a user calls a model into an opened checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxinfer.errors import CheckpointError
from jaxinfer.models.registry import family_for
from jaxinfer.values import shown
from jaxinfer.weights import presets
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.companions import PARAMETERS
from jaxinfer.weights.compressed_tensors import PackedCheckpoint
from jaxinfer.weights.fp8 import FP8Checkpoint
from jaxinfer.weights.random import RandomCheckpoint
from jaxinfer.weights.safetensors import HuggingFaceCheckpoint, read_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model"]
_QUANTISED = {"fp8": FP8Checkpoint, "compressed-tensors": PackedCheckpoint}  # by quant_method


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a preset, a Hugging Face directory, one that `save_parameters` wrote, a .gguf file, or a hub id (`org/name`, fetched into the hub's cache).

    Raises CheckpointError that says what was looked for and where; for a kind of model that is not supported, before any
    weights are looked at.
    """
    if not isinstance(model, str | os.PathLike):
        raise CheckpointError(f"a model is named by text or a path, got {shown(model)}")
    name, path = str(model), Path(model).expanduser()
    if not name.strip():
        raise CheckpointError("the model name is empty: give a preset, a directory, a .gguf file or a hub id")
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise CheckpointError(f"{name} is a file, but not a .gguf; name the directory that holds config.json")
    if presets.is_preset(name):
        if name.startswith("tiny-"):
            return RandomCheckpoint(name)
        return _open_gguf(presets.resolve(name))
    if _HUB_ID.fullmatch(name):
        _check_family(_from_hub(name, ["config.json"]))
        return _open_directory(_from_hub(name, _HUB_FILES))
    known = ", ".join(p.name for p in presets.list_presets())
    raise CheckpointError(
        f"no model {name!r}: it is no directory, no .gguf file, no hub id (org/name), and no preset ({known})"
    )


def _open_gguf(path: Path) -> Checkpoint:
    from jaxinfer.weights.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _open_directory(path: Path) -> Checkpoint:
    _check_family(path)
    if (path / PARAMETERS).exists():
        from jaxinfer.weights.orbax import OrbaxCheckpoint  # takes a second to import

        return OrbaxCheckpoint(path)
    config = read_json(path / "config.json")
    inner = config.get("text_config") or {}
    quantization = config.get("quantization_config") or inner.get("quantization_config")
    if not quantization:
        return HuggingFaceCheckpoint(path)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method not in _QUANTISED:
        raise CheckpointError(
            f"{path} is quantised with quant_method {method!r}, which is not supported; known: {', '.join(_QUANTISED)}"
        )
    return _QUANTISED[method](path, quantization)


def _check_family(path: Path) -> None:
    family_for(read_json(path / "config.json"))


def _from_hub(name: str, files: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(
            f"{name} is no directory here and could not be fetched from the hub ({reason}): "
            "check the name and the network, or give a local path"
        ) from e

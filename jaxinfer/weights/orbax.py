"""Loaded parameters saved with Orbax: a later start restores them as they are, onto whatever devices there are then."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import ParamSpec
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint, Params, ShardingOf
from jaxinfer.weights.companions import PARAMETERS, copy_companions, open_tokenizer
from jaxinfer.weights.layout import pieces, swapped
from jaxinfer.weights.safetensors import read_json
from pallas_kernels.linear import BlockKind, BlockWeights

_STATE = "parameters"
_FORMAT = 1
_CHUNK_BYTES = 64 << 20  # the least that is read for a slice


def save_parameters(path: Path, specs: Sequence[ParamSpec], params: Params, checkpoint: Checkpoint) -> None:
    """Writes a directory that `open_checkpoint` opens: parameters, config, and what else came with `checkpoint`, their source.

    It appears under its name only when it is complete. Raises CheckpointError when the place is taken or cannot be written.
    """
    path = path.expanduser().absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists: choose a new directory, or remove it first")
    tree = {_key(spec): _plain(value) for spec, value in zip(specs, params, strict=True)}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            part = Path(folder) / path.name
            part.mkdir()
            checkpoint.save_companions(part)
            _write_json(part / "config.json", _without_quantization(checkpoint.config))
            _write_json(part / "generation_config.json", checkpoint.generation_config)
            _checkpointer().save(part / _STATE, args=ocp.args.PyTreeSave(tree, save_args))
            _write_json(part / PARAMETERS, _manifest(specs, part / _STATE))
            os.replace(part, path)
    except (OSError, ValueError) as e:  # Orbax says with the latter that a disk is full
        raise CheckpointError(f"{path} cannot be written ({_first_line(e)})") from e


class OrbaxCheckpoint(Checkpoint):
    """A directory that `save_parameters` wrote. `read` takes a tensor out of its parameter, which is read as a whole."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        manifest = read_json(path / PARAMETERS)
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path / PARAMETERS} is of format {manifest.get('format')!r}; known: {_FORMAT}. Save the model again"
            )
        self.config = read_json(path / "config.json")
        self.generation_config = read_json(path / "generation_config.json")
        try:
            self.stored_dtype = manifest["dtype"]
            self._entries: dict[str, dict[str, Any]] = manifest["parameters"]
            self._places = {
                source: key for key, entry in self._entries.items() for source in entry["sources"]
            }
            self._check_files(manifest["files"])
        except KeyError as e:
            raise CheckpointError(f"{path / PARAMETERS} lacks {e}: save the model again") from e

    def _check_files(self, sizes: Mapping[str, int]) -> None:
        """Orbax notices what is missing too, but late and at length."""
        for name, size in sizes.items():
            file = self.path / _STATE / name
            if not file.exists():
                raise CheckpointError(f"{file} is missing: save the model again")
            if file.stat().st_size != size:
                raise CheckpointError(
                    f"{file} is truncated or changed: it has {file.stat().st_size} bytes instead of {size}"
                )

    def names(self) -> Set[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[self._places[name]]["sources"][name])

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(self._entries[self._places[name]]["dtype"] or np.float32)

    def block_kind(self, name: str) -> BlockKind | None:
        return self._entries[self._places[name]]["blocks"]

    def read(self, name: str) -> np.ndarray:
        key = self._places[name]
        entry = self._entries[key]
        value = self._restore({key: _stored(entry)}, lambda _: None)[key]
        dense = np.asarray(value.dense() if isinstance(value, BlockWeights) else value)
        shapes = [tuple(shape) for shape in entry["sources"].values()]
        if entry["transposed"]:
            shapes = [swapped(shape) for shape in shapes]
        wanted = list(entry["sources"]).index(name)
        parts = [part.values for part in pieces(dense, shapes, entry["groups"]) if part.tensor == wanted]
        tensor = np.concatenate(parts)
        return tensor.swapaxes(-1, -2) if entry["transposed"] else tensor

    def restore(self, specs: Sequence[ParamSpec], sharding_of: ShardingOf | None) -> Params:
        by_key = {_key(spec): spec for spec in specs}
        for key, spec in by_key.items():
            if key not in self._entries or _layout(self._entries[key]) != _layout(_entry(spec)):
                raise CheckpointError(
                    f"{self.path} holds {spec.sources[0]!r} otherwise than this version of jaxinfer does: save the model again"
                )
        wanted = {
            # Blocks that are to be spread out are restored as they are, others in the dtype asked for.
            key: _stored(self._entries[key]) if self._entries[key]["blocks"] else spec.value
            for key, spec in by_key.items()
        }
        restored = self._restore(wanted, lambda key: sharding_of(by_key[key]) if sharding_of else None)
        return tuple(_as_declared(spec, restored.pop(key)) for key, spec in by_key.items())

    def _restore(
        self, wanted: Mapping[str, Any], sharding_of: Callable[[str], jax.sharding.Sharding | None]
    ) -> dict[str, Any]:
        """Some parameters by key, given as shapes; all go to the default device but for those that `sharding_of` places."""
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        tree = {}
        for key, value in wanted.items():
            place = sharding_of(key) or default
            tree[key] = jax.tree.map(partial(_placed, place), _plain(value))
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(tree, restore_args, partial_restore=True)
        try:
            restored = _checkpointer().restore(self.path / _STATE, args=args)
        except Exception as e:  # Orbax raises no narrower class when data cannot be read
            raise CheckpointError(
                f"{self.path} is damaged or incomplete ({_first_line(e)}): save the model again"
            ) from e
        return {
            key: BlockWeights(**value) if isinstance(value, dict) else value
            for key, value in restored.items()
        }

    def save_companions(self, folder: Path) -> None:
        copy_companions(self.path, folder)

    def tokenizer(self) -> Tokenizer | None:
        return open_tokenizer(self.path)


def _placed(place: jax.sharding.Sharding, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=place)


def _checkpointer() -> ocp.Checkpointer:
    # Compression takes far longer than it saves: weights are as good as random.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True))


def _key(spec: ParamSpec) -> str:
    return ".".join(map(str, spec.path))


def _entry(spec: ParamSpec) -> dict[str, Any]:
    """What the manifest says about a parameter. dtype: of plain numbers; blocks: the kind of the others."""
    value = spec.value
    return {
        "sources": {name: list(shape) for name, shape in zip(spec.sources, spec.source_shapes, strict=True)},
        "transposed": spec.transposed,
        "groups": spec.groups,
        "shape": list(spec.shape),
        "dtype": None if isinstance(value, BlockWeights) else str(np.dtype(value.dtype)),
        "blocks": value.kind if isinstance(value, BlockWeights) else None,
    }


def _layout(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return list(entry["sources"].items()), *(entry[key] for key in ("transposed", "groups", "shape"))


def _stored(entry: Mapping[str, Any]) -> jax.ShapeDtypeStruct | BlockWeights:
    """A parameter as it is stored, as shapes without values."""
    shape = tuple(entry["shape"])
    if entry["blocks"]:
        return BlockWeights.abstract(entry["blocks"], shape)
    return jax.ShapeDtypeStruct(shape, np.dtype(entry["dtype"]))


def _as_declared(spec: ParamSpec, value: jax.Array | BlockWeights) -> jax.Array | BlockWeights:
    """Spreads out blocks where the model wants plain numbers."""
    if isinstance(value, BlockWeights) and not isinstance(spec.value, BlockWeights):
        return value.dense(spec.value.dtype)
    return value


def _plain(value: Any) -> Any:
    """A tree of dicts, which Orbax stores under its keys."""
    return value._asdict() if isinstance(value, BlockWeights) else value


def _manifest(specs: Sequence[ParamSpec], state: Path) -> dict[str, Any]:
    files = {str(file.relative_to(state)): file.stat().st_size for file in state.rglob("*") if file.is_file()}
    entries = {_key(spec): _entry(spec) for spec in specs}
    dtypes = Counter(entry["dtype"] for entry in entries.values() if entry["dtype"])
    dtype = dtypes.most_common(1)[0][0]  # norms are never in blocks
    return {"format": _FORMAT, "dtype": dtype, "parameters": entries, "files": files}


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what it says of the files that the parameters came from."""
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(result.get("text_config"), Mapping):
        result["text_config"] = _without_quantization(result["text_config"])
    return result


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")

"""Compiled programs kept between starts, so that a later start neither traces nor compiles.

XLA's persistent cache keeps the result of compiling; tracing and lowering a model for every bucket still takes most of a start.
Here the executables themselves are kept, under a key over everything that they are made from: see `ExecutableStore` and `environment_parts`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
from jax.experimental import serialize_executable

import jaxinfer
import pallas_kernels
from jaxinfer import compat
from jaxinfer.cachedir import cache_root
from pallas_kernels import native

logger = logging.getLogger(__name__)

_KEEP = 24  # keys in the user cache; about 15 MB each
_DIGEST = 32


class ExecutableStore:
    """The programs of one key, one file each. What cannot be read is compiled again; what cannot be written is not kept.

    The files hold machine code and pickles. Like the compiled C++ kernels, they are trusted because only this user can
    write the cache's folder.
    """

    def __init__(
        self,
        parts: Mapping[str, str],
        *,
        devices: Sequence[Any] | None = None,
        root: Path | None = None,
    ):
        """
        Args:
          parts: what the programs are made from, by name.
          devices: that the programs run on; None: JAX's default device.
          root: None for the user cache.
        """
        self._devices = jax.devices()[:1] if devices is None else list(devices)
        root = cache_root() / "programs" if root is None else root
        self._folder = (
            root / hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:24]
        )

    def load(self, name: str) -> Any | None:
        """The compiled program of that name, None when there is none that can be used."""
        try:
            content = (self._folder / name).read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                raise ValueError("its checksum is wrong")
            parts = pickle.loads(content[_DIGEST:])
            return serialize_executable.deserialize_and_load(*parts, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as e:  # another version's format, a damaged file: all are answered by compiling
            logger.warning("kept program %s cannot be used and is compiled again: %s", self._folder / name, e)
            return None

    def save(self, name: str, program: Any) -> None:
        try:
            content = pickle.dumps(serialize_executable.serialize(program))
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, self._folder / name)
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as e:
            logger.info("program %s is not kept: %s", name, e)

    def prune(self) -> None:
        """Drops the keys that were used longest ago, beyond the number kept."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.utime(self._folder)
            folders = sorted(self._folder.parent.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True)
        except OSError:
            return
        for folder in folders[_KEEP:]:
            shutil.rmtree(folder, ignore_errors=True)


def environment_parts() -> dict[str, str]:
    """What compiled programs depend on beside the model and the shapes: code, versions, processor, devices, settings."""
    devices = jax.devices()
    return {
        "code": _source_digest(),
        "versions": repr((jax.__version__, importlib.metadata.version("jaxlib"), flax.__version__)),
        "platform": repr((devices[0].client.platform_version, [d.device_kind for d in devices])),
        "processor": native.processor(),
        "kernels": repr(native.available()),
        "flags": repr((os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS"))),
        "settings": repr(sorted(compat.compile_settings().items())),
    }


def class_digest(cls: type) -> str:
    """Of the source files that a class and its bases are written in, wherever they are: a family may live outside this package."""
    digest = hashlib.sha256()
    for file in sorted({inspect.getsourcefile(base) or "" for base in cls.__mro__ if base is not object}):
        if os.path.isfile(file):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


@functools.cache
def _source_digest() -> str:
    """Of every file that programs are written in."""
    ours, kernels = Path(jaxinfer.__path__[0]), Path(pallas_kernels.__path__[0])
    digest = hashlib.sha256()
    for root in (*(ours / room for room in ("config", "engine", "kv", "models", "parallel")), kernels):
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cc", ".h", ".json")):
            digest.update(f"{path.relative_to(root.parent)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

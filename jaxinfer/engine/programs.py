"""Programs that are compiled ahead, or when they are first asked for, and kept between starts."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer import compat
from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.executables import ExecutableStore
from jaxinfer.parallel.programs import EVERYWHERE, abstract_on, jit_on, put


class CompiledPrograms(ABC):
    """Programs over one set of devices, by key.

    Attributes:
      mesh: what they run on; None: one device.
      num_compiled: programs built so far; constant once `compile_all` has returned.
    """

    def __init__(self, mesh: Mesh | None, store: ExecutableStore | None):
        """store: where programs are read from, and written to where they are not there; None: they are not kept."""
        self.mesh = mesh
        self._store = store
        self._compiled: dict[tuple, Any] = {}
        self._pool: ThreadPoolExecutor | None = None  # while everything is compiled
        self._compiling: dict[tuple, Future] = {}

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @abstractmethod
    def ask_for_all(self) -> None:
        """Asks for every program that serving can ask for."""

    def compile_all(self) -> None:
        """Builds every program that serving can ask for."""
        # Lowering holds the GIL, compiling does not.
        with ThreadPoolExecutor(os.cpu_count()) as pool, self._fresh():
            self._pool = pool
            self.ask_for_all()
            self._pool = None
            self._compiled |= {key: program.result() for key, program in self._compiling.items()}
            self._compiling.clear()
        if self._store:
            self._store.prune()

    def put(self, value: np.ndarray | np.generic) -> jax.Array:
        """A host array on every device of the mesh."""
        return put(value, self.everywhere)

    @property
    def everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, EVERYWHERE)

    def _get(self, key: tuple, lower: Callable[[], Any]) -> Any:
        program = self._compiled.get(key)
        if program is None:
            name = "-".join(str(astuple(p) if isinstance(p, Bucket) else p) for p in key).replace(", ", "_")
            program = self._store.load(name) if self._store else None
            if program is None:
                lowered = lower()
                if self._pool is not None:
                    self._compiling[key] = self._pool.submit(self._compile, lowered, name)
                    return None
                with self._fresh():
                    program = self._compile(lowered, name)
            self._compiled[key] = program
        return program

    def _compile(self, lowered: Any, name: str) -> Any:
        program = lowered.compile()
        if self._store:
            self._store.save(name, program)
        return program

    def _fresh(self) -> contextlib.AbstractContextManager[None]:
        """Programs to be kept must not come from XLA's own cache."""
        return compat.without_compilation_cache() if self._store else contextlib.nullcontext()

    def _lower(
        self,
        function: Callable[..., Any],
        *args: tuple[Any, Any],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Traces a program; args: shapes of each argument, and how it is spread over the mesh."""
        program = jit_on(self.mesh, function, tuple(spec for _, spec in args), out_specs, donate)
        return program.lower(*(abstract_on(self.mesh, s, spec) for s, spec in args))

"""The one place that touches JAX's settings and private corners."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer.cachedir import cache_root


def platform() -> str:
    """ "cpu" or "gpu": where computations run by default."""
    return jax.default_backend()


def make_cpu_devices(count: int) -> None:
    """Splits the CPU into so many devices, if JAX has not started yet, runs on CPU, and nobody has said how many."""
    if xla_bridge.backends_are_initialized() or "xla_force_host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    ):
        return
    if jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user cache (JAXINFER_CACHE overrides its place), also small and quick ones.

    A cache that the user configured through JAX itself is left as it is.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compiles anew inside: XLA's CPU executables that come from its cache cannot be serialised again (jax 0.11)."""
    enabled = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()  # it remembers whether it is in use
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def compile_settings() -> dict[str, Any]:
    """JAX's settings by name, but for those that name places on this machine."""
    places = ("_dir", "_file", "_dump_ir_to", "_prefix", "_address")
    return {name: value for name, value in jax.config.values.items() if not name.endswith(places)}


def free_memory(mesh: jax.sharding.Mesh | None = None) -> int:
    """Bytes free on the first device of a mesh, or on the host where the device does not say."""
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Store:
    """What the processes of jax.distributed share: texts by name.

    Attributes:
      host: of process 0.
    """

    host: str
    num_processes: int
    process_id: int

    def set(self, key: str, value: str) -> None:
        _client().key_value_set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        """Waits until it is set."""
        return _client().blocking_key_value_get(key, int(timeout_s * 1000))


def _client() -> Any:
    return distributed.global_state.client


def join_processes(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    num_devices: int,
    timeout_s: int,
) -> Store:
    """Starts jax.distributed, on the coordinator's address alone. Without arguments JAX asks the cluster that runs the process.

    num_devices: of all processes together; on CPU each makes its share of them.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _keep_stdout()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=timeout_s,
        coordinator_bind_address=coordinator if process_id == 0 else None,
    )
    state = distributed.global_state
    make_cpu_devices(num_devices // state.num_processes)
    address = state.coordinator_address
    assert address is not None
    return Store(address.rsplit(":", 1)[0].strip("[]"), state.num_processes, state.process_id)


def _keep_stdout() -> None:
    """Leaves stdout to Python alone: Gloo writes there whom it has reached, which goes to stderr from now on."""
    if sys.stdout is None or sys.stdout is not sys.__stdout__:
        return
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    own.reconfigure(line_buffering=bool(sys.stdout.line_buffering))
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__ = own


def gather_from_processes(value: int) -> np.ndarray:
    """Every process's value, int64 [processes]. All must call it."""
    return np.asarray(multihost_utils.process_allgather(np.asarray([value], np.int64))).reshape(-1)


def spans_processes(mesh: jax.sharding.Mesh) -> bool:
    """Whether some of its devices are other processes'."""
    return len({device.process_index for device in mesh.devices.flat}) > 1

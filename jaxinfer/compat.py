"""The one place that touches JAX's settings and private corners."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import xla_bridge
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


def free_memory() -> int:
    """Bytes free on the first device, or on the host where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

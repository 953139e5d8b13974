"""CPU kernels in C++: built once with the machine's own compiler, kept in the user cache, registered with XLA.

XLA's CPU backend gathers pages into copies and runs thin bfloat16 products as naive loops; these kernels read weights and pages
once, in place, on XLA's own threads (see docs/performance.md). Where no C++ compiler is found, the XLA versions serve.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import platformdirs

logger = logging.getLogger(__name__)

_TARGETS = {  # folder of native.cc: its custom-call targets, each named jaxinfer_NAME
    "grouped_linear": ("grouped_linear", "grouped_linear_blocks"),
    "linear": ("linear", "linear_blocks"),
    "mla_attention": ("mla_attention",),
    "paged_attention": ("paged_attention",),
    "rms_norm": ("rms_norm",),
}
_FLAGS = ("-O3", "-march=native", "-w", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")


@functools.cache
def available() -> bool:
    """Whether the kernels are built and registered; builds them on the first call. JAXINFER_NATIVE=0 switches them off."""
    if os.environ.get("JAXINFER_NATIVE") == "0":
        return False
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.SubprocessError) as e:
        logger.warning("CPU kernels are not available, plain XLA serves (slower): %s", e)
        return False
    for target in (f"jaxinfer_{name}" for names in _TARGETS.values() for name in names):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return True


def _build() -> Path:
    """The shared library for these sources, this compiler and this processor; made if it is not in the cache."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler found (g++, clang++ or c++): install one, or name one in CXX")
    root = Path(__file__).parent
    sources = [root / op / "native.cc" for op in _TARGETS]
    content = b"".join(file.read_bytes() for file in (*sorted(root.rglob("*.h")), *sources))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    key = hashlib.sha256(repr((content, version, _FLAGS, processor(), jax.__version__)).encode()).hexdigest()[
        :16
    ]
    cache_root = Path(os.environ.get("JAXINFER_CACHE") or platformdirs.user_cache_dir("jaxinfer"))
    cache = cache_root.expanduser() / "native"
    library = cache / f"kernels-{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / library.name
        command = [
            compiler,
            *_FLAGS,
            f"-I{root}",
            f"-I{jax.ffi.include_dir()}",
            *map(str, sources),
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise OSError(f"{compiler} failed: {errors[0]}")
        os.replace(made, library)  # another process may have been first: its file is as good
    return library


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

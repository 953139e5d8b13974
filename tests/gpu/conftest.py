"""A Python that can compile for GPUs.

The CUDA plugin has an environment of its own: where it is installed, JAX looks for a driver at every start. It lies over this one and is kept in the
user cache: three wheels, 0.6 GB. What else jaxinfer[cuda12] brings serves to run programs, not to compile them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig

import jax
import pytest

from jaxinfer.cachedir import cache_root

WHEELS = [
    f"jax-cuda12-plugin=={jax.__version__}",
    f"jax-cuda12-pjrt=={jax.__version__}",
    "nvidia-cuda-nvcc-cu12==12.9.*",
]
UNREACHABLE = (
    "Failed to establish a new connection",
    "Connection broken",
    "Name or service not known",
    "Temporary failure",
)


@pytest.fixture(scope="session")
def gpu_python() -> str:
    """A Python that can compile for GPUs."""
    if importlib.util.find_spec("jax_cuda12_plugin") is not None:
        return sys.executable
    home = cache_root() / f"gpu-compile-{jax.__version__}-py{sys.version_info[0]}{sys.version_info[1]}"
    python, finished = home / "bin" / "python", home / "finished"
    if not finished.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", home], check=True)
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--no-deps",
            "--no-input",
            *WHEELS,
        ]
        done = subprocess.run(install, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            if any(sign in done.stdout + done.stderr for sign in UNREACHABLE):
                pytest.skip(f"the CUDA plugin cannot be fetched: {last}")
            pytest.fail(f"pip could not install {WHEELS}: {last}", pytrace=False)
        finished.touch()
    # This environment shows through, wherever it is today.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(python)

"""Set up before any test module is imported: eight fake CPU devices, and run-time checks of all annotations."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jaxtyping
import pytest
from hypothesis import settings

jaxtyping.install_import_hook(["jaxinfer", "pallas_kernels"], "typecheck.check")

# The first example of a property may compile a program: time says nothing about it.
settings.register_profile("jaxinfer", deadline=None)
settings.load_profile("jaxinfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker("network")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations go unchecked, as they do for users: for tests of what answers a value of the wrong type."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of the preset smollm2-135m, fetched when this machine does not have it."""
    from jaxinfer.errors import CheckpointError
    from jaxinfer.weights import presets

    try:
        return presets.resolve("smollm2-135m")
    except CheckpointError as error:
        pytest.fail(str(error), pytrace=False)

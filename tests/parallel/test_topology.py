"""Names of GPUs that are not there."""

from __future__ import annotations

import importlib.util

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.parallel.topology import kinds, topology


def test_a_name_says_how_many_and_which():
    eight, one = topology("8xH100"), topology("h200")
    assert (eight.count, eight.kind) == (8, "h100")
    assert (one.count, one.kind) == (1, "h200")
    assert eight.memory_bytes == 84_942_979_072
    assert one.memory_bandwidth == 4_800_000_000_000


@pytest.mark.parametrize("kind", kinds())
def test_every_description_has_the_figures(kind: str):
    found = topology(kind)
    assert 16e9 < found.memory_bytes < 1e12
    assert 1e11 < found.memory_bandwidth < 1e14


@pytest.mark.parametrize("name", ["", "8x", "0xh100", "8xb300", "h100x8", "-1xh100", "../h100"])
def test_other_names_are_refused(name: str):
    with pytest.raises(ConfigError, match=r"not COUNTxKIND, such as 8xh100; known kinds: h100, h200"):
        topology(name)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the CUDA plugin is installed"
)
def test_without_the_plugin_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"cannot compile for 2xh100: install jaxinfer\[cuda12\]"):
        topology("2xh100").devices()

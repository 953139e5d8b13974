from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.config.engine import EngineConfig
from jaxinfer.errors import ConfigError

COUNTS = [field.name for field in dataclasses.fields(EngineConfig) if field.type.startswith("int")]


def config(**options) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 64, **options})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", ["2", 1.5, "9", True, [3], np.float32(4)])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_integers(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer, got "):
        config(**{name: value})


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_at_least_one(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got {value}"):
        config(**{name: value})


@pytest.mark.usefixtures("unchecked")
def test_numpy_integers_are_integers():
    made = config(max_num_seqs=np.int64(3), num_pages=np.uint32(7))
    assert (made.max_num_seqs, made.num_pages, made.kv_cache_bytes) == (3, 7, None)
    assert type(made.max_num_seqs) is type(made.num_pages) is int


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "value"), [("enable_prefix_caching", "no"), ("max_num_seqs", None)])
def test_other_wrong_types(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be "):
        config(**{name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_size": 24, "prefill_block": 32}, "prefill_block=32 must be a multiple of page_size=24"),
        ({"max_prefill_tokens": 48}, "max_prefill_tokens=48 must be a multiple of prefill_block=32"),
    ],
)
def test_numbers_that_disagree_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        config(**options)

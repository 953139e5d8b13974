"""Programs kept between starts: a second process compiles nothing and computes the same; nothing stale or damaged is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import compat
from jaxinfer.engine.executables import ExecutableStore, environment_parts

START = """
import json
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
)
from jaxinfer import LLM, SamplingParams
llm = LLM("tiny-llama", max_num_seqs=4, max_prefill_tokens=64, max_model_len=OPTION)
output = llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1))
print(json.dumps([len(compiled), output[2].outputs[0].token_ids]))
"""


def start(cache: Path, max_model_len: int = 128) -> tuple[int, list[int]]:
    """Compiles of one process, and what it generated."""
    done = subprocess.run(
        [sys.executable, "-c", START.replace("OPTION", str(max_model_len))],
        env={**os.environ, "JAXINFER_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    compiles, ids = json.loads(done.stdout)
    return compiles, ids


def test_a_second_start_compiles_nothing(tmp_path: Path):
    compiles, ids = start(tmp_path)
    assert compiles > 10
    assert start(tmp_path) == (0, ids)
    # A damaged program, and one that is missing, are made again.
    files = sorted(f for f in (tmp_path / "programs").glob("*/*") if f.name.startswith("forward"))
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
    files[1].write_bytes(files[1].read_bytes()[:100])
    files[2].unlink()
    assert start(tmp_path) == (3, ids)
    assert start(tmp_path) == (0, ids)
    # Another context length is another program.
    compiles, _ = start(tmp_path, 192)
    assert compiles > 10


def compiled(factor: float):
    with compat.without_compilation_cache():
        return jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


def test_a_key_is_everything_it_is_made_of(tmp_path: Path):
    store = ExecutableStore({"a": "1", "b": "2"}, root=tmp_path)
    store.save("double", compiled(2.0))
    kept = ExecutableStore({"b": "2", "a": "1"}, root=tmp_path).load("double")
    assert kept is not None
    assert kept(jnp.ones(4)).tolist() == [2.0] * 4
    assert ExecutableStore({"a": "1", "b": "3"}, root=tmp_path).load("double") is None
    assert store.load("triple") is None


def test_the_environment_names_what_matters(monkeypatch: pytest.MonkeyPatch):
    before = environment_parts()
    assert all(before.values())
    monkeypatch.setenv("XLA_FLAGS", "--xla_another=1")
    changed = environment_parts()
    assert {name for name in before if before[name] != changed[name]} == {"flags"}
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        changed = environment_parts()
    assert {name for name in before if before[name] != changed[name]} == {"settings"}


def test_keys_used_long_ago_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.engine.executables._KEEP", 2)
    stores = [ExecutableStore({"n": str(n)}, root=tmp_path) for n in range(3)]
    for store in stores:
        store.prune()
        for folder in tmp_path.iterdir():
            os.utime(folder, (folder.stat().st_atime, folder.stat().st_mtime - 10))
    assert len(list(tmp_path.iterdir())) == 2
    stores[1].prune()
    stores[0].prune()  # makes its folder anew, and stores[2] is the oldest
    stores[1].save("p", compiled(1.0))
    assert stores[1].load("p") is not None


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    store = ExecutableStore({}, root=tmp_path / "file")
    store.save("p", compiled(1.0))
    store.prune()
    assert store.load("p") is None

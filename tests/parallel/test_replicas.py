"""Copies of a model side by side: the tokens of one, and each request where it belongs."""

from __future__ import annotations

from collections import Counter

import pytest
from oracles import load_oracle

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.replicas import ReplicatedEngine
from jaxinfer.errors import ConfigError, OverloadError, RequestError

ENGINE = {"dtype": "float32", "warm_up": False, "page_size": 4, "prefill_block": 8, "max_prefill_tokens": 16}
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def copies() -> LLM:
    return LLM(load_oracle("llama3").path, dp=2, tp=2, max_num_seqs=2, max_waiting=4, **ENGINE)


def engine_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm.engine, ReplicatedEngine)
    return llm.engine


def finish(engine: ReplicatedEngine) -> set[str]:
    done = set()
    while engine.has_unfinished_requests():
        done |= {output.request_id for output in engine.step() if output.finished}
    return done


def test_greedy_tokens_are_those_of_one_copy(copies: LLM):
    oracle = load_oracle("llama3")
    params = SamplingParams(max_tokens=len(oracle.greedy[0]), temperature=0, ignore_eos=True)
    for _ in range(2):
        outputs = copies.generate(oracle.prompts * 2, params)
        assert [out.outputs[0].token_ids for out in outputs] == oracle.greedy * 2
    assert all(engine.num_steps > 0 for engine in engine_of(copies).engines)
    devices = [
        {device for array in engine._runner.stages[0].cache for device in array.devices()}
        for engine in engine_of(copies).engines
    ]
    assert devices[0].isdisjoint(devices[1])
    assert [len(each) for each in devices] == [2, 2]


def test_requests_are_shared_out_evenly(copies: LLM):
    engine = engine_of(copies)
    for i in range(8):
        engine.add_request(f"r{i}", [i + 1] * 5, SHORT)
    assert [e.load().waiting for e in engine.engines] == [4, 4]
    assert engine.load().waiting == 8
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("r0", [1], SHORT)
    assert finish(engine) == {f"r{i}" for i in range(8)}
    assert engine.load().running == 0
    assert engine.num_pages == sum(e.num_pages for e in engine.engines)


def test_a_prompt_goes_where_its_beginning_is_cached(copies: LLM):
    engine = engine_of(copies)
    homes = Counter()
    for i in range(6):
        engine.add_request(f"r{i}", [9, 8, 7, 6, 5, 4, i + 1], SHORT)
        homes[engine._homes[f"r{i}"]] += 1
        finish(engine)
    assert len(homes) == 1
    for salt in ("a", "b"):
        engine.add_request(salt, [9, 8, 7, 6, 5, 4], SHORT, cache_salt=salt)
    assert {engine._homes["a"], engine._homes["b"]} == set(
        engine.engines
    )  # nothing of them is cached anywhere
    finish(engine)


def test_when_all_are_full_and_when_one_is_left(copies: LLM):
    engine = engine_of(copies)
    for i in range(8):
        engine.add_request(f"r{i}", [i + 1], SHORT)
    with pytest.raises(OverloadError):
        engine.add_request("more", [1], SHORT)
    engine.abort_request("r3")
    engine.add_request("more", [1], SHORT)
    for i in range(8):
        engine.abort_request(f"r{i}")
    engine.abort_request("more")
    engine.abort_request("nobody")
    assert not engine.has_unfinished_requests()
    assert not engine._homes


def test_too_many_copies():
    with pytest.raises(ConfigError, match="dp=4 x pp=1 x ep=1 x tp=4 needs 16 devices, there are 8"):
        LLM("tiny-llama", dp=4, tp=4)
    with pytest.raises(ConfigError, match="share no process group"):
        LLM("tiny-llama", dp=2, coordinator="127.0.0.1:1", num_processes=2, process_id=0)

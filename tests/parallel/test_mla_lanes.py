"""Latents that each device keeps for its own lane's sequences alone: the tokens of one device, in a part of the memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from oracles import load_oracle

from jaxinfer import LLM, SamplingParams
from jaxinfer.parallel.hlo import collectives

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "warm_up": False,
    "page_size": 4,
    "prefill_block": 8,
    "max_prefill_tokens": 32,
}


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


@functools.cache
def on_one_device(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, some with a common prefix, and their tokens."""
    oracle = load_oracle(name)
    vocab = int(oracle.tokens.max()) + 1
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab, 21).tolist()
    prompts = [shared + rng.integers(0, vocab, n).tolist() for n in (1, 3, 9, 19, 2, 5, 14)]
    prompts += [rng.integers(0, vocab, n).tolist() for n in (1, 4, 33, 17)]
    return prompts, greedy(LLM(oracle.path, max_num_seqs=4, max_model_len=64, **ENGINE), prompts, 24)


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [("deepseek_v3", 2, 1), ("deepseek_v3", 4, 1), ("kimi_k25_int4", 2, 2)],
)
def test_shared_prefixes_chunks_and_preemption_give_the_tokens_of_one_device(name: str, tp: int, ep: int):
    oracle = load_oracle(name)
    few = 20  # pages of a lane: one sequence of the longest takes 16
    options: dict[str, Any] = ENGINE | {
        "max_prefill_tokens": 8 * tp,
        "max_num_seqs": 2 * tp,
        "num_pages": tp * few,
    }
    lanes = LLM(oracle.path, tp=tp, ep=ep, max_model_len=64, **options)
    prompts, expected = on_one_device(name)
    assert greedy(lanes, prompts, 24) == expected
    scheduler = lanes.engine.scheduler
    assert scheduler.num_preemptions > 0
    scheduler.check_integrity()
    assert len(scheduler.lanes) == tp
    assert all(kv.cache.keys for kv in scheduler.lanes)  # every lane has had sequences
    assert greedy(lanes, prompts, 24) == expected  # now also from the prefix cache
    for array in lanes.engine._runner.stages[0].cache:
        assert array.shape[2] == tp * few
        assert {shard.data.shape[2] for shard in array.addressable_shards} == {few}


def test_prompt_log_probabilities():
    oracle = load_oracle("deepseek_v3")
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1, logprobs=1)
    one, two = (LLM(oracle.path, tp=tp, max_num_seqs=4, **ENGINE) for tp in (1, 2))
    for a, b in zip(one.generate(oracle.prompts, params), two.generate(oracle.prompts, params), strict=True):
        for x, y in zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                assert (x.token_id, x.logprob) == (y.token_id, pytest.approx(y.logprob, abs=1e-4))


def test_two_all_to_alls_a_layer_carry_queries_and_what_they_find():
    tp = 4
    llm = LLM(load_oracle("deepseek_v3").path, tp=tp, max_num_seqs=4, **ENGINE)
    config, programs = llm.model_config, llm.engine._runner.stages[0].programs
    assert config.mla is not None
    page_bytes = programs._spec.bytes_per_page
    for bucket in (programs._buckets.fit(1, 0), programs._buckets.fit(0, 1)):
        found = collectives(programs.forward(bucket).as_text())
        swaps = {what.num_bytes: count for what, count in found.items() if what.kind == "all-to-all"}
        values = bucket.num_tokens * config.num_heads // tp * 4
        assert swaps == {
            values * config.mla.latent_dim: config.num_layers,
            values * config.mla.kv_rank: config.num_layers,
        }
        assert {what.kind for what in found} == {"all-to-all", "all-reduce"}
        sums = sum(count for what, count in found.items() if what.kind == "all-reduce")
        assert sums == 2 * config.num_layers + 1
        largest = max(what.num_bytes for what in found)
        assert largest < llm.engine.num_pages * page_bytes / 8

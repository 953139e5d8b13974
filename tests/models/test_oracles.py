"""Logits and greedy tokens of every family against transformers, through every road a token can take."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import Oracle, load_oracle, log_softmax

from jaxinfer import LLM, SamplingParams

NAMES = [
    "llama3",
    "llama_tied",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "llama4_text",
    "llama4_vision",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "kimi_k25",
    "kimi_k25_int4",
    "qwen3_moe_sliding",
    "llama4_defaults",
    "gemma3_untied",
]
TOLERANCE = 2e-4  # of the logits' standard deviation


def open_llm(oracle: Oracle, **options) -> LLM:
    return LLM(oracle.path, dtype="float32", warm_up=False, **options)


def greedy(oracle: Oracle, **options) -> SamplingParams:
    return SamplingParams(max_tokens=len(oracle.greedy[0]), temperature=0, ignore_eos=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_one_prefill(name: str):
    oracle = load_oracle(name)
    llm = open_llm(oracle, max_num_seqs=1)
    for tokens, expected in zip(oracle.tokens.tolist(), oracle.logits, strict=True):
        error = np.abs(llm.logits(tokens) - expected).max() / expected.std()
        assert error < TOLERANCE


@pytest.mark.parametrize(("name", "chunk"), [*((name, 5) for name in NAMES), ("llama3", 1), ("llama3", 16)])
def test_prefill_in_chunks_then_decode(name: str, chunk: int):
    oracle = load_oracle(name)
    options = {
        "page_size": chunk,
        "prefill_block": chunk,
        "max_prefill_tokens": chunk,
        "enable_prefix_caching": False,
    }
    llm = open_llm(oracle, max_num_seqs=2, **options)
    outputs = llm.generate(oracle.prompts, greedy(oracle, prompt_logprobs=0))
    assert [out.outputs[0].token_ids for out in outputs] == oracle.greedy
    for out, logits in zip(outputs, oracle.logits, strict=True):
        assert out.prompt_logprobs is not None
        for position, scored in enumerate(out.prompt_logprobs[1:]):
            assert scored is not None
            assert scored.logprob == pytest.approx(log_softmax(logits[position])[scored.token_id], abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_engine_with_a_shared_prefix(name: str):
    oracle = load_oracle(name)
    llm = open_llm(oracle, max_num_seqs=8, page_size=4, prefill_block=8, max_prefill_tokens=16)
    cold = llm.generate(oracle.prompts * 2, greedy(oracle))
    warm = llm.generate(oracle.prompts * 3, greedy(oracle))
    assert all(out.cached_tokens > 0 for out in warm)
    assert [out.outputs[0].token_ids for out in cold] == oracle.greedy * 2
    assert [out.outputs[0].token_ids for out in warm] == oracle.greedy * 3


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_close(name: str):
    """At most 8 roundings a layer (weights, keys, values, what enters each product), each of 2^-9, add up at worst.

    Of the median position: a router that rounds to another expert changes its token altogether.
    """
    oracle = load_oracle(name)
    llm = LLM(oracle.path, dtype="bfloat16", warm_up=False, max_num_seqs=1)
    expected = oracle.logits[0]
    error = np.abs(llm.logits(oracle.tokens[0].tolist()) - expected).mean(axis=1) / expected.std()
    assert 1e-4 < np.median(error) < 8 * llm.model_config.num_layers * 2**-9

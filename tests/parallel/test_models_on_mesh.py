"""Every family over several devices: the tokens of one device, and the communication that the textbook says."""

from __future__ import annotations

import re

import numpy as np
import pytest
from oracles import load_oracle

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.request import RequestOutput, TokenLogprob
from jaxinfer.errors import ConfigError

ENGINE = {"dtype": "float32", "warm_up": False, "page_size": 4, "prefill_block": 8, "max_prefill_tokens": 16}
# Degrees of tensor and expert parallelism; llama3 has 2 key heads, so that 4 devices share them.
CASES = [
    ("llama3", 2, 1),
    ("llama3", 4, 1),
    ("qwen3_moe", 2, 1),
    ("qwen3_moe", 1, 4),
    ("qwen3_moe", 2, 4),
    ("gemma3_text", 4, 1),
    ("llama4_text", 4, 1),
    ("llama4_text", 2, 2),
    ("deepseek_v3", 4, 1),
    ("deepseek_v3", 2, 4),
    ("kimi_k25_int4", 2, 4),
]


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_logits_and_greedy_tokens_are_those_of_one_device(name: str, tp: int, ep: int):
    oracle = load_oracle(name)
    llm = LLM(oracle.path, tp=tp, ep=ep, max_num_seqs=4, **ENGINE)
    error = np.abs(llm.logits(oracle.tokens[0].tolist()) - oracle.logits[0]).max() / oracle.logits.std()
    assert error < 2e-4
    params = SamplingParams(max_tokens=len(oracle.greedy[0]), temperature=0, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(oracle.prompts * 2, params)
        assert [out.outputs[0].token_ids for out in outputs] == oracle.greedy * 2
    assert outputs[0].cached_tokens > 0


def test_sampling_penalties_and_log_probabilities():
    oracle = load_oracle("llama3")
    params = [
        SamplingParams(
            max_tokens=12, temperature=1.2, seed=i, top_p=0.8, top_k=40, logprobs=4, ignore_eos=True,
            presence_penalty=0.4, repetition_penalty=1.2, logit_bias={7: 2.0}, prompt_logprobs=2,
        )
        for i in range(4)
    ]  # fmt: skip
    one, four = (
        LLM(oracle.path, tp=tp, max_num_seqs=4, **ENGINE).generate(oracle.prompts * 2, params)
        for tp in (1, 4)
    )
    for a, b in zip(one, four, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(scores(a), scores(b), strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


def scores(output: RequestOutput) -> list[TokenLogprob]:
    """Of the prompt but for its first token, then of the completion."""
    return [
        s for s in [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())] if s is not None
    ]


def collectives(llm: LLM) -> list[tuple[str, int]]:
    """(kind, values that travel) of each collective in a compiled decode step."""
    programs = llm.engine._runner.stages[0].programs
    bucket = next(b for b in programs._buckets.all() if not b.blocks)
    text = programs.forward(bucket).as_text()
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= \(?\w+\[([\d,]*)\].* (all-reduce|all-gather|all-to-all|collective-permute)\(", line
        )
        if match:
            sizes = [int(n) for n in match[1].split(",") if n]
            found.append((match[2], int(np.prod(sizes))))
    return found


@pytest.mark.parametrize(
    ("name", "tp", "ep", "a_layer"),
    [("llama3", 2, 1, 2), ("qwen3", 4, 1, 2), ("qwen3_moe", 1, 4, 1), ("llama4_text", 2, 2, 2)],
)
def test_collectives_of_a_decode_step(name: str, tp: int, ep: int, a_layer: int):
    """One sum for the embedding, then two a layer (after attention, after the feed-forward), each of rows x width values."""
    oracle = load_oracle(name)
    llm = LLM(oracle.path, tp=tp, ep=ep, max_num_seqs=2, **ENGINE)
    config = llm.model_config
    found = collectives(llm)
    assert [kind for kind, _ in found] == ["all-reduce"] * (a_layer * config.num_layers + (tp > 1))
    rows = max(size for _, size in found) // config.hidden_size
    assert {size for _, size in found} == {rows * config.hidden_size}
    assert rows <= 2


@pytest.mark.parametrize(
    ("tp", "ep", "says"),
    [
        (3, 1, "tp=3 does not divide 4 attention heads"),
        (16, 1, "tp=16 needs 16 devices, there are 8"),
        (1, 3, "8 experts do not divide among 3 devices"),
        (0, 1, "tp must be an integer of at least 1, got 0"),
    ],
)
def test_impossible_sizes_name_the_numbers(tp: int, ep: int, says: str):
    with pytest.raises(ConfigError, match=says):
        LLM(load_oracle("qwen3_moe").path, tp=tp, ep=ep, **ENGINE)

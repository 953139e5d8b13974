"""Layers that look back over different spans, in one engine: what it generates is what the whole sequence at once predicts."""

from __future__ import annotations

import sys

import alternating
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import registry
from jaxinfer.weights import random as random_weights


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setitem(sys.modules, "jaxinfer.models.alternating", alternating)
    monkeypatch.setitem(registry._FAMILIES, "alternating", ("alternating", "Alternating"))
    config = {**random_weights._CONFIGS["tiny-llama"], "model_type": "alternating", "num_hidden_layers": 4}
    monkeypatch.setitem(random_weights._CONFIGS, "tiny-llama", config)
    return LLM(
        "tiny-llama",
        warm_up=False,
        max_model_len=128,
        max_num_seqs=4,
        page_size=4,
        prefill_block=8,
        max_prefill_tokens=32,
        num_pages=70,
    )


def predicted(llm: LLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(llm.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_with_a_window_that_gives_pages_back(llm: LLM):
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 512, 40).tolist()
    prompts = [shared + rng.integers(3, 512, n).tolist() for n in (1, 5, 11, 17)] + [
        rng.integers(3, 512, 7).tolist()
    ]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected = [predicted(llm, prompt, 24) for prompt in prompts]
    # 70 pages do not hold the five at once: some are preempted. The second round reads the first one's prefixes.
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert any(o.cached_tokens >= 36 for o in outputs)
    llm.engine.scheduler.check_integrity()

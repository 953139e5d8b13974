"""Logits and greedy tokens of the Llama family against transformers, through every road a token can take."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import Oracle, load_oracle, smollm2_cases

from jaxinfer import LLM, SamplingParams
from jaxinfer.text.chat import encode_chat

NAMES = ["llama3", "llama_tied"]
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5, 16])
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


def test_chosen_and_top_logprobs_are_the_reference_s():
    oracle = load_oracle("llama3")
    llm = open_llm(oracle, max_num_seqs=2)
    prompt = oracle.tokens[0].tolist()
    [out] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, logprobs=5, ignore_eos=True))
    expected = log_softmax(oracle.logits[0, -1])
    [scored] = out.outputs[0].logprobs or []
    assert [i for i, _ in scored.top] == np.argsort(-expected)[:5].tolist()
    np.testing.assert_allclose([lp for _, lp in scored.top], np.sort(expected)[::-1][:5], atol=1e-3)
    assert scored.logprob == pytest.approx(expected.max(), abs=1e-3)


def test_hidden_states_lead_to_the_logits():
    oracle = load_oracle("llama_tied")
    llm = open_llm(oracle, max_num_seqs=1)
    tokens = oracle.tokens[0].tolist()
    states = llm.hidden_states(tokens, layers=[0, 1, -1])
    embedding = np.asarray(llm.engine._runner._head[0])
    np.testing.assert_array_equal(states[0], embedding[tokens])
    np.testing.assert_allclose(states[-1] @ embedding.T, oracle.logits[0], atol=2e-4 * oracle.logits.std())


def test_bfloat16_stays_close():
    """bfloat16 keeps 8 bits of each value; its error through 3 layers stays within a few of those bits of the logits' spread."""
    oracle = load_oracle("llama3")
    llm = LLM(oracle.path, dtype="bfloat16", warm_up=False, max_num_seqs=1)
    expected = oracle.logits[0]
    error = np.abs(llm.logits(oracle.tokens[0].tolist()) - expected)
    assert 1e-4 < error.mean() / expected.std() < 2**-5


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> LLM:
    return LLM(smollm2_path, dtype="float32", warm_up=False, max_num_seqs=16, max_model_len=512)


def smollm2_prompt(llm: LLM, case: dict) -> list[int]:
    assert llm.tokenizer is not None
    if "prompt" in case:
        return llm.tokenizer.encode(case["prompt"])
    assert llm.chat_template is not None
    assert llm.chat_template.render(case["messages"]) == case["rendered"]
    return encode_chat(llm.tokenizer, llm.chat_template, case["messages"])


def test_smollm2_prompts_and_logits(smollm2: LLM):
    for case in smollm2_cases():
        tokens = smollm2_prompt(smollm2, case)
        assert tokens == case["token_ids"]
        logits = smollm2.logits(tokens)
        top = np.argsort(-logits[-1])[: len(case["top_ids"])]
        assert top.tolist() == case["top_ids"]
        np.testing.assert_allclose(logits[-1][top], case["top_logits"], atol=2e-3)


def test_smollm2_greedy_tokens_and_prompt_logprobs(smollm2: LLM):
    cases = smollm2_cases()
    params = SamplingParams(max_tokens=48, temperature=0, prompt_logprobs=0)
    outputs = smollm2.generate([case["token_ids"] for case in cases], params)
    for case, out in zip(cases, outputs, strict=True):
        [completion] = out.outputs
        assert completion.token_ids == case["greedy_ids"]
        ended = case["greedy_ids"][-1] == 2
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.text == case["greedy_text"].removesuffix("<|im_end|>")
        assert out.prompt_logprobs is not None
        scored = [entry.logprob for entry in out.prompt_logprobs[1:] if entry is not None]
        np.testing.assert_allclose(scored, case["prompt_logprobs"], atol=2e-3)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    peak = logits.max()
    return logits - peak - np.log(np.exp(logits - peak).sum())

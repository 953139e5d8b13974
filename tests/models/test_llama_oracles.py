"""What the Llama oracles hold beyond logits (see test_oracles.py), and SmolLM2 from its GGUF file."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import Oracle, load_oracle, log_softmax, smollm2_cases

from jaxinfer import LLM, SamplingParams
from jaxinfer.text.chat import encode_chat


def open_llm(oracle: Oracle, **options) -> LLM:
    return LLM(oracle.path, dtype="float32", warm_up=False, **options)


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

"""What users of other engines reported, replayed here: ids as in the collection of public bug reports that the project keeps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "tiny-llama",
        max_num_seqs=16,
        max_model_len=256,
        page_size=8,
        prefill_block=16,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
    )


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


def tokens(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def test_b10_stop_conditions_are_each_request_s_own(llm: LLM):
    prompts = [prompt(i, 20) for i in range(3)]
    free = tokens(llm, prompts, GREEDY)
    first = free[0][3]  # ends the first request, and would end the others where they meet it
    others = [next((t for t in out[4:] if t not in out[:4]), out[-1]) for out in free[1:]]
    params = [GREEDY.replace(stop_token_ids=[t]) for t in (first, *others)]
    for got, whole, stop in zip(tokens(llm, prompts, params), free, (first, *others), strict=True):
        assert got == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words_ids"])
@pytest.mark.parametrize("token", [512, 2**31, 2**40])
def test_b17_b18_ids_outside_the_vocabulary_are_refused_and_touch_no_row(llm: LLM, field: str, token: int):
    value = {"logit_bias": {token: 5.0}, "bad_words_ids": [[token]]}.get(field, [token])
    with pytest.raises(RequestError, match=field):
        llm.generate([prompt(0, 5)], GREEDY.replace(**{field: value}))
    assert not llm.engine.has_unfinished_requests()


def test_b19_a_request_id_is_free_again_when_its_request_has_ended(llm: LLM):
    engine = llm.engine
    engine.add_request("same", prompt(0, 9), GREEDY)
    with pytest.raises(RequestError, match="in use by an unfinished request"):
        engine.add_request("same", prompt(1, 9), GREEDY)
    results = []
    for _ in range(3):
        while engine.has_unfinished_requests():
            results += [o.outputs[0].token_ids for o in engine.step() if o.finished]
        if len(results) < 3:
            engine.add_request("same", prompt(0, 9), GREEDY)
    assert results == tokens(llm, [prompt(0, 9)], GREEDY) * 3
    engine.add_request("same", prompt(0, 9), GREEDY)
    engine.abort_request("same")
    engine.add_request("same", prompt(0, 9), GREEDY)
    engine.abort_request("same")


def test_b24_a_burst_of_prefills_gives_everyone_their_own_first_token(llm: LLM):
    """More one-token requests than slots, over and over, so that slots and padding rows change hands in every step."""
    prompts = [prompt(i, 3 + i % 29) for i in range(64)]
    one = GREEDY.replace(max_tokens=1)
    serial = [tokens(llm, [p], one)[0] for p in prompts]
    assert tokens(llm, prompts, one) == serial
    assert tokens(llm, prompts[::-1], one) == serial[::-1]


def test_b41_a_seed_repeats_beside_unseeded_mates_and_inside_one_batch(llm: LLM):
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
    unseeded = seeded.replace(seed=None)
    [alone] = tokens(llm, [prompt(5, 10)], seeded)
    together = tokens(llm, [prompt(5, 10)] * 4, [unseeded, seeded, unseeded, seeded])
    assert together[1] == together[3] == alone
    assert together[0] != together[2]


def test_b43_the_random_state_moves_on_each_step(llm: LLM):
    """Flat logits: a bias of -100 on every token leaves differences too small to matter beside temperature 2."""
    flat = SamplingParams(
        max_tokens=64, temperature=2.0, seed=3, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0
    )
    first, again = (tokens(llm, [prompt(8, 6)], flat)[0] for _ in range(2))
    assert first == again
    assert len(set(first)) > 32


def test_b45_every_row_has_its_own_parameters_around_every_bucket(llm: LLM):
    """Rows that are greedy, forced by allowed ids, or seeded, at each batch size around the padded ones 2, 8 and 16."""
    kinds = [
        GREEDY,
        GREEDY.replace(allowed_token_ids=[77]),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=2, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.5, seed=9, ignore_eos=True),
    ]
    expected = [tokens(llm, [prompt(1, 8)], kind)[0] for kind in kinds]
    assert expected[1] == [77] * 12
    for count in (1, 2, 3, 7, 8, 9, 15, 16):
        rows = list(itertools.islice(itertools.cycle(range(4)), count))
        assert tokens(llm, [prompt(1, 8)] * count, [kinds[r] for r in rows]) == [expected[r] for r in rows]


def test_b46_penalties_do_not_count_padding_nor_depend_on_who_came_first(llm: LLM):
    punished = GREEDY.replace(repetition_penalty=1.8, presence_penalty=1.0)
    prompts = [prompt(i, length) for i, length in enumerate((3, 17, 40))]
    alone = [tokens(llm, [p], punished)[0] for p in prompts]
    for order in itertools.permutations(range(3)):
        mixed = [GREEDY if i == 1 else punished for i in order]
        got = tokens(llm, [prompts[i] for i in order], mixed)
        for i, out in zip(order, got, strict=True):
            assert i == 1 or out == alone[i]


def test_b47_penalties_count_the_prompt_where_they_should_and_the_last_token_at_once(llm: LLM):
    """A token that greedy would repeat: presence keeps it out from the second time on, and only repetition sees the prompt."""
    start = prompt(2, 12)
    logits = llm.logits(start)[-1]
    best = int(logits.argmax())
    with_best = [best, *start[1:]]
    favourite = int(llm.logits(with_best)[-1].argmax())
    forced = GREEDY.replace(max_tokens=6, allowed_token_ids=[favourite, 5], logit_bias={favourite: 100.0})
    assert tokens(llm, [with_best], forced) == [[favourite] * 6]
    # 2 + 2 a token cannot outweigh 100, but a repetition penalty of 100 on a positive logit of about 100 can.
    repeated = tokens(llm, [with_best], forced.replace(logit_bias={favourite: 3.0}, frequency_penalty=2.0))
    assert repeated[0][0] == favourite
    assert 5 in repeated[0]
    gap = llm.logits(with_best)[-1]
    assert gap[favourite] > gap[5]


def test_b49_only_ids_of_the_vocabulary_come_out(llm: LLM):
    wild = SamplingParams(max_tokens=60, temperature=2.0, ignore_eos=True)
    assert all(0 <= t < 512 for out in tokens(llm, [prompt(i, 4) for i in range(16)], wild) for t in out)


def test_b51_scores_of_a_cached_prompt_equal_a_cold_run(llm: LLM):
    cached = LLM("tiny-llama", warm_up=False, max_num_seqs=2, max_model_len=256)
    scored = GREEDY.replace(prompt_logprobs=2, max_tokens=2)
    text = prompt(4, 70)
    cold = cached.generate([text], scored)[0].prompt_logprobs
    cached.generate([text], GREEDY)
    warm = cached.generate([text], scored)[0]
    assert warm.cached_tokens == 0
    assert warm.prompt_logprobs == cold


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_cache_of_fewer_bits_is_close(llm: LLM, kv_dtype: str):
    """Keys and values rounded to 8 or 4 significant bits move log-probabilities by about that much, and nothing else."""
    narrow = LLM("tiny-llama", warm_up=False, max_num_seqs=4, max_model_len=256, kv_dtype=kv_dtype)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    exact, rounded = (
        [entry.logprob for entry in m.generate([prompt(3, 60)], params)[0].prompt_logprobs or () if entry]
        for m in (llm, narrow)
    )
    error = np.abs(np.subtract(exact, rounded))
    bound = {"bfloat16": 2**-8, "float8_e4m3fn": 2**-4}[kv_dtype] * np.std(exact)
    assert 0 < error.mean() < bound
    assert len(tokens(narrow, [prompt(3, 60)] * 3, GREEDY)[0]) == 12

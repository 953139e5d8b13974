"""The engine with a tiny real model: what callers see, whatever runs beside their request."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.request import RequestOutput
from jaxinfer.errors import ConfigError, OverloadError, RequestError

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "page_size": 8,
    "prefill_block": 16,
    "max_prefill_tokens": 64,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-llama", max_num_seqs=8, **OPTIONS)


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same model with one sequence at a time and nothing cached."""
    return LLM("tiny-llama", max_num_seqs=1, enable_prefix_caching=False, warm_up=False, **OPTIONS)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


def ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def params(seed: int, **options) -> SamplingParams:
    """Sampling parameters of every kind, drawn from the seed."""
    rng = random.Random(seed)
    kind = rng.choice(["greedy", "plain", "narrow", "penalties", "bias"])
    chosen = {
        "greedy": {"temperature": 0.0},
        "plain": {"temperature": 1.2},
        "narrow": {"temperature": 0.9, "top_k": rng.choice([0, 3, 40]), "top_p": 0.8, "min_p": 0.01},
        "penalties": {
            "temperature": 0.7,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.4,
        },
        "bias": {"temperature": 0.8, "logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 4},
    }[kind]
    return SamplingParams(max_tokens=rng.randint(1, 24), seed=seed, **{**chosen, **options})


def test_a_request_alone_and_in_any_company_gives_the_same_tokens(llm: LLM, alone: LLM):
    """Forty requests of all kinds over eight slots: they pass through every bucket, and share prefixes."""
    prompts = [prompt(i % 3, 40)[: 1 + 7 * (i % 6)] + prompt(100 + i, 1 + i % 29) for i in range(40)]
    settings = [params(i) for i in range(40)]
    expected = [ids(alone.generate([p], s)[0]) for p, s in zip(prompts, settings, strict=True)]
    assert [ids(out) for out in llm.generate(prompts, settings)] == expected
    order = random.Random(1).sample(range(40), 40)
    again = llm.generate([prompts[i] for i in order], [settings[i] for i in order])
    assert [ids(out) for out in again] == [expected[i] for i in order]
    assert max(out.cached_tokens for out in again) > 0


def test_pages_running_out_changes_nothing(alone: LLM):
    """A pool for barely more than one sequence: others are preempted and start again."""
    small = LLM("tiny-llama", max_num_seqs=6, num_pages=40, warm_up=False, **OPTIONS)
    prompts = [prompt(i, 20 + 9 * i) for i in range(6)]
    settings = [
        SamplingParams(max_tokens=90, seed=i, ignore_eos=True, temperature=1.0, presence_penalty=0.2 * i)
        for i in range(6)
    ]
    expected = [ids(alone.generate([p], s)[0]) for p, s in zip(prompts, settings, strict=True)]
    preemptions = 0
    for i, (p, s) in enumerate(zip(prompts, settings, strict=True)):
        small.engine.add_request(str(i), p, s)
    sequences = list(small.engine.scheduler.waiting)
    done = {}
    while small.engine.has_unfinished_requests():
        done |= {out.request_id: ids(out) for out in small.engine.step() if out.finished}
        small.engine.scheduler.check_integrity()
    preemptions = sum(seq.num_preemptions for seq in sequences)
    assert preemptions > 0
    assert [done[str(i)] for i in range(6)] == expected
    load = small.engine.load()
    assert (load.waiting, load.running, load.kv_usage) == (0, 0, 0)
    assert (load.generated_tokens, load.preemptions) == (6 * 90, preemptions)
    assert load.prefilled_tokens > sum(map(len, prompts))


def test_nothing_compiles_after_warm_up(llm: LLM):
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    before = llm.engine._runner.stages[0].programs.num_compiled
    prompts = [prompt(i, 1 + (i * 37) % 200) for i in range(30)]
    settings = [
        params(i, logprobs=3 if i % 4 == 0 else None, prompt_logprobs=1 if i % 5 == 0 else None)
        for i in range(30)
    ]
    llm.generate(prompts, settings)
    assert llm.engine._runner.stages[0].programs.num_compiled == before
    assert not [event for event in events if "compile" in event]
    jax.jit(lambda x: x * 3 + len(events))(1.0)  # the listener would have heard
    assert [event for event in events if "compile" in event]


def test_the_cache_is_updated_in_place():
    """No step may copy the cache: temporaries stay small beside it."""
    llm = LLM("tiny-llama", max_num_seqs=8, num_pages=40_000, warm_up=False, **OPTIONS)
    programs = llm.engine._runner.stages[0].programs
    cache_bytes = 40_000 * llm.engine._runner.stages[0].programs._spec.bytes_per_page
    for bucket in programs._buckets.all():
        analysis = programs.forward(bucket).memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes < 0.05 * cache_bytes
        assert analysis.alias_size_in_bytes == cache_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_s_bits_do_not_depend_on_the_bucket(dtype: str):
    """Hidden states and tokens of the same decode rows through every shape of step, compared bit for bit."""
    llm = LLM("tiny-llama", dtype=dtype, max_num_seqs=32, warm_up=False, **OPTIONS)
    runner = llm.engine._runner
    programs = runner.stages[0].programs
    slots = np.arange(2)
    seen = {}
    for bucket in programs._buckets.all():
        if not bucket.decode:
            continue
        layout = programs.layout(bucket)
        ints = np.zeros(layout.size, np.int32)
        tokens, positions, kv_lens, samples, tables = layout.views(ints)
        for position in range(5):
            tokens[:2], positions[:2], kv_lens[:2] = (100 + position, 200 + position), position, position + 1
            tables[0, :2, 0] = 1 + slots
            samples[:2] = slots
            held = ints.copy()  # the device may still read what it was given
            _, rows, runner.stages[0].cache = programs.forward(bucket)(
                runner.stages[0].params, runner.stages[0].cache, runner._last_tokens, held, None
            )
        drawn, runner._last_tokens, _, _ = programs.sample(bucket.samples, False)(
            runner._head,
            rows,
            runner._last_tokens,
            np.zeros((bucket.samples, 11), np.int32),
            np.bool_(False),
            None,
        )
        seen[bucket] = (np.asarray(rows)[:2].tobytes(), np.asarray(drawn)[:2].tobytes())
    assert len(set(seen.values())) == 1, {bucket: hash(bits) for bucket, bits in seen.items()}


def test_seeds(llm: LLM):
    request = prompt(7, 12)
    free = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    assert ids(llm.generate([request], free)[0]) != ids(llm.generate([request], free)[0])
    seeded = free.replace(seed=11)
    assert ids(llm.generate([request], seeded)[0]) == ids(llm.generate([request], seeded)[0])
    [several] = llm.generate([request], seeded.replace(n=3))
    assert len({tuple(tokens) for tokens in ids(several)}) == 3
    assert ids(several)[0] == ids(llm.generate([request], seeded)[0])[0]


def test_completions_of_one_prompt_share_its_pages(llm: LLM):
    request = prompt(8, 64)
    llm.generate([request], SamplingParams(max_tokens=8, n=4, seed=1, ignore_eos=True), cache_salt="n>1")
    scheduler = llm.engine.scheduler
    sequences = []
    llm.engine.add_request(
        "n", request, SamplingParams(max_tokens=8, n=4, seed=1, ignore_eos=True), cache_salt="new"
    )
    sequences = list(scheduler.waiting)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert [seq.cached_tokens for seq in sequences] == [0, 56, 56, 56]


def test_salts_keep_tenants_apart(llm: LLM):
    request = prompt(9, 64)
    short = SamplingParams(max_tokens=2, temperature=0)
    assert llm.generate([request], short, cache_salt="a")[0].cached_tokens == 0
    assert llm.generate([request], short, cache_salt="b")[0].cached_tokens == 0
    assert llm.generate([request], short, cache_salt="a")[0].cached_tokens == 56


def test_ends(llm: LLM):
    request = prompt(10, 5)
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    tokens = ids(llm.generate([request], greedy)[0])[0]
    assert len(tokens) == 10

    def end(**options) -> tuple:
        [out] = llm.generate([request], greedy.replace(**options))
        completion = out.outputs[0]
        return completion.token_ids, completion.finish_reason, completion.stop_reason

    assert end() == (tokens, "length", None)
    assert end(stop_token_ids=(tokens[4],)) == (tokens[: tokens.index(tokens[4]) + 1], "stop", tokens[4])
    assert end(max_tokens=1) == (tokens[:1], "length", None)
    [out] = llm.generate([request], greedy.replace(ignore_eos=False, logit_bias={2: 100.0}))
    assert (ids(out), out.outputs[0].finish_reason) == ([[2]], "stop")
    [out] = llm.generate([request], greedy.replace(ignore_eos=False, logit_bias={2: 100.0}, min_tokens=6))
    assert len(ids(out)[0]) == 7
    assert 2 not in ids(out)[0][:-1]


def test_context_limit(llm: LLM):
    full = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    [out] = llm.generate([prompt(11, 250)], full)
    assert len(ids(out)[0]) == 6
    assert out.outputs[0].finish_reason == "length"
    [out] = llm.generate([prompt(11, 255)], full)
    assert len(ids(out)[0]) == 1
    with pytest.raises(RequestError, match=r"256 tokens.*context of 256") as error:
        llm.generate([prompt(11, 256)], full)
    assert error.value.code == "context_length_exceeded"


def test_allowed_and_bad_words(llm: LLM):
    request = prompt(12, 9)
    sampled = SamplingParams(max_tokens=40, temperature=2.0, seed=3, ignore_eos=True)
    [out] = llm.generate([request], sampled.replace(allowed_token_ids=(7, 8, 9)))
    assert set(ids(out)[0]) == {7, 8, 9}
    [out] = llm.generate(
        [request], sampled.replace(allowed_token_ids=(7, 8, 9), bad_words_ids=((9, 9), (8, 8), (7, 8, 7)))
    )
    words = ids(out)[0]
    assert set(words) == {7, 8, 9}
    assert (8, 8) not in itertools.pairwise(words)
    assert (7, 8, 7) not in zip(words, words[1:], words[2:], strict=False)
    [out] = llm.generate([request], sampled.replace(allowed_token_ids=(7,), bad_words_ids=((7, 7),)))
    assert (ids(out), out.outputs[0].finish_reason) == ([[7]], "error")
    [out] = llm.generate([request], sampled.replace(allowed_token_ids=(7,), bad_words_ids=((7,),)))
    assert (ids(out), out.outputs[0].finish_reason) == ([[]], "error")


def test_penalties_do_what_they_say(llm: LLM):
    request = prompt(13, 9)
    greedy = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=tuple(range(40, 80))
    )
    [out] = llm.generate(
        [request], greedy.replace(presence_penalty=2.0, frequency_penalty=2.0, logit_bias=None)
    )
    assert len(set(ids(out)[0])) > 5
    # 40 tokens are allowed and 40 generated; -inf-like penalties would make them all different: use the largest repetition penalty.
    [strong] = llm.generate([request], greedy.replace(repetition_penalty=100.0))
    assert len(set(ids(strong)[0])) > len(set(ids(llm.generate([request], greedy)[0])[0]))


def test_prompt_logprobs_ignore_cached_prefixes(llm: LLM):
    request = prompt(14, 70)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    [cold] = llm.generate([request], scored)
    [warm] = llm.generate([request], scored)
    assert warm.cached_tokens == 0
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert cold.prompt_logprobs is not None
    assert cold.prompt_logprobs[0] is None
    assert [entry.token_id for entry in cold.prompt_logprobs[1:] if entry] == request[1:]
    logits = llm.logits(request).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for i, entry in enumerate(cold.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(expected[i, request[i + 1]], abs=1e-3)
        assert [t for t, _ in entry.top] == np.argsort(-expected[i])[:2].tolist()


def test_abort_at_any_moment_frees_everything(llm: LLM):
    pool = llm.engine.scheduler.kv.pool
    for steps in range(6):
        llm.engine.add_request(
            "gone", prompt(20 + steps, 100), SamplingParams(max_tokens=50, n=2, seed=1, ignore_eos=True)
        )
        llm.engine.add_request(
            "kept", prompt(40 + steps, 10), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort_request("gone")
        llm.engine.abort_request("gone")
        kept = []
        while llm.engine.has_unfinished_requests():
            kept = [out for out in llm.engine.step() if out.finished] or kept
        assert [out.request_id for out in kept] == ["kept"]
        assert len(ids(kept[0])[0]) == 12
        llm.engine.scheduler.check_integrity()
        assert pool.available == pool.total


def test_impossible_requests_are_refused_and_leave_nothing_behind(llm: LLM):
    good = SamplingParams(max_tokens=2, temperature=0)
    for bad_prompt, bad_params in [
        ([], good),
        ([512], good),
        ([-1], good),
        ([5], good.replace(logit_bias={512: 1.0})),
        ([5], good.replace(stop_token_ids=(9999,))),
        ([5], good.replace(allowed_token_ids=(512,))),
    ]:
        with pytest.raises(RequestError):
            llm.generate([bad_prompt], bad_params)
    llm.engine.add_request("twice", [5], good)
    with pytest.raises(RequestError, match="in use"):
        llm.engine.add_request("twice", [5], good)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert len(ids(llm.generate([[5]], good)[0])[0]) == 2


def test_one_impossible_prompt_fails_the_call_before_any_is_run(llm: LLM):
    with pytest.raises(RequestError):
        llm.generate([[5], [600]], SamplingParams(max_tokens=2, temperature=0))
    assert not llm.engine.has_unfinished_requests()


def test_overload(llm: LLM):
    small = LLM("tiny-llama", max_num_seqs=1, max_waiting=2, warm_up=False, **OPTIONS)
    for i in range(2):
        small.engine.add_request(str(i), [5], SamplingParams(max_tokens=1))
    with pytest.raises(OverloadError):
        small.engine.add_request("2", [5], SamplingParams(max_tokens=1))


def test_nan_ends_its_request_alone():
    """A poisoned embedding row: the request that reads it fails, its neighbour and successors do not."""
    llm = LLM("tiny-llama", max_num_seqs=4, warm_up=False, **OPTIONS)
    runner = llm.engine._runner
    expected = llm.generate([prompt(31, 20)], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0]
    poisoned = [
        np.asarray(value).copy() if spec.sources == ("model.embed_tokens.weight",) else value
        for spec, value in zip(runner.stages[0].programs._flat.specs, runner.stages[0].params, strict=True)
    ]
    for value in poisoned:
        if isinstance(value, np.ndarray):
            value[500] = np.nan
    runner.stages[0].params = tuple(map(jax.device_put, poisoned))
    bad, good = llm.generate(
        [[500, 7, 8], prompt(31, 20)], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    )
    assert bad.outputs[0].finish_reason == "error"
    assert "NaN" in (bad.error or "")
    assert ids(good) == ids(expected)
    assert ids(
        llm.generate([prompt(31, 20)], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0]
    ) == ids(expected)


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="unknown engine option 'page_sise'"):
        LLM("tiny-llama", page_sise=8)
    with pytest.raises(ConfigError, match="exceeds the 4096 positions"):
        LLM("tiny-llama", max_model_len=5000)
    with pytest.raises(ConfigError, match="multiple of page_size"):
        LLM("tiny-llama", page_size=48)
    with pytest.raises(ConfigError, match="raise it or lower max_model_len"):
        LLM("tiny-llama", num_pages=10)
    with pytest.raises(ConfigError, match="raise it or lower max_model_len"):
        LLM("tiny-llama", kv_cache_bytes=1000)
    with pytest.raises(ConfigError, match="pp=3 needs as many layers at least, and this model has 2"):
        LLM("tiny-llama", pp=3)
    with pytest.raises(ConfigError, match="kv_dtype 'int3'"):
        LLM("tiny-llama", kv_dtype="int3")

"""Pipelines: the tokens of one device, one send a boundary and microbatch, and stages that do not wait for each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from oracles import DIRECTORY, load_oracle
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.errors import ConfigError
from jaxinfer.parallel.hlo import collectives

ENGINE = {"dtype": "float32", "warm_up": False, "page_size": 4, "prefill_block": 8, "max_prefill_tokens": 16}
CASES = [
    ("llama3", {"pp": 3}),
    ("gemma3_text", {"pp": 2}),  # tied embeddings; windows
    ("llama4_text", {"pp": 4}),  # a stage without full attention
    ("deepseek_v3", {"pp": 2, "ep": 2, "tp": 2}),
    ("qwen3_moe", {"pp": 2, "ep": 2, "tp": 2}),
    ("kimi_k25_int4", {"pp": 3}),
]


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.engine, Engine)
    return llm.engine._runner


def devices_of(runner: ModelRunner) -> list[set[Any]]:
    """Of each stage."""
    meshes = [stage.programs.mesh for stage in runner.stages]
    return [set(mesh.devices.flat) for mesh in meshes if mesh is not None]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(load_oracle("llama3").path, pp=2, max_num_seqs=4, **ENGINE)


@pytest.mark.parametrize(("name", "degrees"), CASES, ids=[name for name, _ in CASES])
def test_logits_and_greedy_tokens_are_those_of_one_device(name: str, degrees: dict[str, int]):
    oracle = load_oracle(name)
    llm = LLM(oracle.path, max_num_seqs=4, **degrees, **ENGINE)
    error = np.abs(llm.logits(oracle.tokens[0].tolist()) - oracle.logits[0]).max() / oracle.logits.std()
    assert error < 2e-4
    params = SamplingParams(max_tokens=len(oracle.greedy[0]), temperature=0, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(oracle.prompts * 2, params)
        assert [out.outputs[0].token_ids for out in outputs] == oracle.greedy * 2
    assert outputs[0].cached_tokens > 0


def test_images_enter_at_the_first_stage():
    expected = load_file(DIRECTORY / "kimi_k25" / "expected.safetensors")
    llm = LLM(load_oracle("kimi_k25").path, pp=2, max_num_seqs=4, max_media_tokens=9, **ENGINE)
    ids, grids = expected["image_tokens"][0].tolist(), expected["image_grid_thw"]
    logits = llm.logits(ids, expected["pixel_values"], grids)
    wanted = expected["image_logits"][0]
    assert np.abs(logits - wanted).max() / wanted.std() < 2e-4
    assert llm.tower is not None
    media = llm.tower.split(expected["pixel_values"], grids.tolist())
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for i in range(3):  # only one of these has room for its images at a time
        llm.engine.add_request(f"{i}", ids, params, media=media, cache_salt=f"{i}")
    found = []
    while llm.engine.has_unfinished_requests():
        found += [out.outputs[0].token_ids for out in llm.engine.step() if out.finished]
    assert found == [[int(wanted[-1].argmax())]] * 3


def test_each_device_has_its_stage_alone(llm: LLM):
    runner = runner_of(llm)
    assert devices_of(runner) == [{device} for device in jax.devices()[:2]]
    for stage, devices in zip(runner.stages, devices_of(runner), strict=True):
        for array in jax.tree.leaves((stage.params, stage.cache)):
            assert array.devices() == devices
    layers = [stage.programs.stage.layers for stage in runner.stages]
    assert [i for part in layers for i in part] == list(range(llm.model_config.num_layers))
    assert [len(stage.cache) for stage in runner.stages] == [len(part) for part in layers]
    assert len(llm.params) == sum(len(stage.params) for stage in runner.stages)


def test_what_the_sampler_knows_waits_for_its_microbatch(llm: LLM):
    """Penalties, biases and scores, with slots that change hands while microbatches are on their way: as on one device."""
    oracle = load_oracle("llama3")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, llm.vocab_size, n).tolist() for n in (3, 21, 9, 30, 5, 14, 2, 17)]
    params = [
        SamplingParams(
            max_tokens=3 + i % 4, temperature=1.0, seed=i, top_p=0.9, logprobs=3, ignore_eos=True,
            presence_penalty=0.4, repetition_penalty=1.2, logit_bias={7: 2.0}, min_tokens=2,
            prompt_logprobs=2 if i % 2 else None,
        )
        for i in range(8)
    ]  # fmt: skip
    one = LLM(oracle.path, max_num_seqs=4, **ENGINE).generate(prompts, params)
    for a, b in zip(one, llm.generate(prompts, params), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(scores(a), scores(b), strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


def scores(output: Any) -> list[Any]:
    return [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]


@pytest.fixture
def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """("compute" or "send", stage, microbatch) of what the runner gives the devices, in its order."""
    runner = runner_of(llm)
    seen: list[tuple[str, int, int]] = []

    def watch(kind: str) -> None:
        inner = getattr(runner, f"_{kind}")

        def watched(stage: int, step: Any) -> None:
            seen.append((kind, stage, step.number))
            inner(stage, step)

        monkeypatch.setattr(runner, f"_{kind}", watched)

    watch("compute")
    watch("send")
    return seen


def test_stages_work_at_the_same_time(llm: LLM, watched: list[tuple[str, int, int]]):
    """On devices that do what they are given in order, in one unit of time a microbatch, no stage waits once all have work."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm.generate([[5 + i] * 4 for i in range(4)], params)
    stages = len(runner_of(llm).stages)
    clock, done = [0.0] * stages, Counter[int]()
    for kind, stage, _ in watched:
        if kind == "compute":
            clock[stage] += 1
            done[stage] += 1
        else:  # both ends meet
            other = (stage + 1) % stages
            clock[stage] = clock[other] = max(clock[stage], clock[other])
    assert done[0] == done[1] >= 2 * 40
    assert max(clock) <= done[0] + 6  # a bubble at either end, and while prompts come and go


def test_one_send_a_boundary_and_microbatch(llm: LLM, watched: list[tuple[str, int, int]]):
    llm.generate([[9, 8, 7]] * 2, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    computed = {(stage, job) for kind, stage, job in watched if kind == "compute"}
    sent = Counter((stage, job) for kind, stage, job in watched if kind == "send")
    assert sent == Counter(computed)  # from the last stage: sampled tokens, to the first one
    runner = runner_of(llm)
    for shape in runner.stages[0].programs.hidden_shapes():
        found = collectives(runner.links[0].program(shape.shape, shape.dtype).as_text())
        assert [(c.kind, c.num_bytes, times) for c, times in found.items()] == [
            ("collective-permute", shape.shape[0] * llm.model_config.hidden_size * 4, 1)
        ]
    slots = llm.engine.config.max_num_seqs + 1
    found = collectives(runner.links[1].program((slots,), np.int32).as_text())
    assert [(c.kind, c.num_bytes) for c in found] == [("collective-permute", slots * 4)]
    # The stages themselves are of one device each, and exchange nothing: least of all their caches.
    for stage in runner.stages:
        for bucket in stage.programs._buckets.all()[:1]:
            assert not collectives(stage.programs.forward(bucket).as_text())


def test_what_is_sent_arrives_on_every_device_of_the_next_stage():
    llm = LLM("tiny-llama", pp=2, tp=2, max_model_len=64, max_num_seqs=2, warm_up=False)
    runner = runner_of(llm)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrived = runner.links[0].send(runner.stages[0].programs.put(values))
    assert {shard.device for shard in arrived.addressable_shards} == devices_of(runner)[1]
    for shard in arrived.addressable_shards:
        np.testing.assert_array_equal(shard.data, values)


def test_nothing_compiles_after_warm_up():
    llm = LLM("tiny-llama", pp=2, max_model_len=64, max_num_seqs=4, max_prefill_tokens=64)
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    params = [SamplingParams(max_tokens=5, temperature=0.5, logprobs=i % 2 or None) for i in range(5)]
    llm.generate([list(range(3, 4 + 9 * i)) for i in range(5)], params)
    assert not [event for event in events if "compile" in event]


@pytest.mark.parametrize(
    ("pp", "tp", "says"),
    [
        (3, 1, "pp=3 needs as many layers at least, and this model has 2"),
        (9, 1, "pp=9 x ep=1 x tp=1 needs 9 devices, there are 8"),
        (4, 4, "pp=4 x ep=1 x tp=4 needs 16 devices, there are 8"),
    ],
)
def test_impossible_sizes_name_the_numbers(pp: int, tp: int, says: str):
    with pytest.raises(ConfigError, match=says):
        LLM("tiny-llama", pp=pp, tp=tp, warm_up=False)


def test_stages_in_several_processes_are_refused():
    with pytest.raises(ConfigError, match="pp=2: stages in several processes are not there yet"):
        LLM("tiny-llama", pp=2, coordinator="localhost:9", num_processes=2, process_id=0)

"""Images through whole models, against transformers, by teacher forcing and through the engine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracles import DIRECTORY, Oracle, load_oracle
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.models.layers import rope
from jaxinfer.models.vision import llama4

TOLERANCE = 2e-4  # of the logits' standard deviation
NAMES = ["kimi_k25", "llama4_vision"]


def open_llm(oracle: Oracle, **options: Any) -> LLM:
    return LLM(oracle.path, dtype="float32", warm_up=False, **{"max_num_seqs": 2, **options})


def images_of(name: str) -> tuple[list[int], np.ndarray, np.ndarray | None]:
    """Tokens, pixel values and grids."""
    expected = load_file(DIRECTORY / name / "expected.safetensors")
    return expected["image_tokens"][0].tolist(), expected["pixel_values"], expected.get("image_grid_thw")


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def expected_logits(name: str) -> np.ndarray:
    file = "intact" if name == "llama4_vision" else "expected"  # see tests/oracles/README.md
    return load_file(DIRECTORY / name / f"{file}.safetensors")["image_logits"][0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_reference_s(name: str):
    llm = open_llm(load_oracle(name))
    assert error(llm.logits(*images_of(name)), expected_logits(name)) < TOLERANCE


def test_recorded_llama4_logits_come_from_rounded_tables(monkeypatch: pytest.MonkeyPatch):
    """With the recorder's two tables the recorded values come out: all else agrees with it."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    phases, frequencies = llama4.rope_phases, rope.inverse_frequencies
    monkeypatch.setattr(llama4, "rope_phases", lambda c: np.arccos(rounded(np.cos(phases(c)))))
    monkeypatch.setattr(llama4.np, "sin", np.zeros_like)  # the tower's only sine
    monkeypatch.setattr(
        "jaxinfer.models.decoder.inverse_frequencies",
        lambda *args, **options: (rounded(frequencies(*args, **options)[0]), 1.0),
    )
    llm = open_llm(load_oracle("llama4_vision"))
    recorded = load_file(DIRECTORY / "llama4_vision" / "expected.safetensors")["image_logits"][0]
    assert error(llm.logits(*images_of("llama4_vision")), recorded) < TOLERANCE


def items_of(llm: LLM, name: str) -> tuple[list[int], list[MediaItem]]:
    tokens, pixels, grids = images_of(name)
    assert llm.tower is not None
    items = llm.tower.split(pixels, None if grids is None else grids.tolist())
    named = [MediaItem(i.pixel_values, i.num_tokens, bytes([n]), i.grid_thw) for n, i in enumerate(items)]
    return tokens, named


def run(llm: LLM, request_id: str, tokens: list[int], media: list[MediaItem]) -> tuple[list[int], int]:
    """Eight greedy tokens, and how many of the prompt's were cached."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    llm.engine.add_request(request_id, tokens, params, media=media)
    while True:
        for output in llm.engine.step():
            if output.finished:
                assert output.error is None
                return output.outputs[0].token_ids, output.cached_tokens


def teacher_forced(llm: LLM, tokens: list[int], media: list[MediaItem]) -> list[int]:
    ids = list(tokens)
    for _ in range(8):
        ids.append(int(llm._teacher.logits(ids, media)[-1].argmax()))
    return ids[len(tokens) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_the_engine_s_tokens_are_the_teacher_s(name: str, chunk: int):
    options = {
        "page_size": chunk,
        "prefill_block": chunk,
        "max_prefill_tokens": chunk,
        "max_media_tokens": 12,
    }
    llm = open_llm(load_oracle(name), **options)
    tokens, media = items_of(llm, name)
    expected = teacher_forced(llm, tokens, media)
    cold, _ = run(llm, "cold", tokens, media)
    warm, cached = run(llm, "warm", tokens, media)
    assert cold == warm == expected
    assert cached == (len(tokens) - 1) // chunk * chunk
    swapped = [media[1], media[0]] if name == "llama4_vision" else media[:1]
    if name == "kimi_k25":  # its images differ in size: another one of the same shape in the first place
        other = MediaItem(
            media[0].pixel_values[::-1].copy(), media[0].num_tokens, b"other", media[0].grid_thw
        )
        swapped = [other, media[1]]
    result, cached = run(llm, "other images", tokens, swapped)
    assert cached == 0
    assert result == teacher_forced(llm, tokens, swapped)


def test_requests_with_and_without_images_share_steps():
    llm = open_llm(load_oracle("kimi_k25"), max_num_seqs=4, max_media_tokens=9)
    tokens, media = items_of(llm, "kimi_k25")
    plain = [5, 6, 7, 8, 9]
    expected = [teacher_forced(llm, tokens, media), teacher_forced(llm, plain, [])]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for i in range(3):  # only one of these has room for its images at a time
        llm.engine.add_request(f"images {i}", tokens, params, media=media, cache_salt=f"tenant {i}")
        llm.engine.add_request(f"plain {i}", plain, params)
    found = {}
    while llm.engine.has_unfinished_requests():
        found |= {out.request_id: out.outputs[0].token_ids for out in llm.engine.step() if out.finished}
    assert [found[f"images {i}"] for i in range(3)] == [expected[0]] * 3
    assert [found[f"plain {i}"] for i in range(3)] == [expected[1]] * 3


def test_what_does_not_fit_together_is_refused():
    llm = open_llm(load_oracle("kimi_k25"), max_media_tokens=7)
    tokens, media = items_of(llm, "kimi_k25")
    params = SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match=r"has 8 image placeholders .token 310., its images need"):
        llm.engine.add_request("one", tokens, params, media=media[:1])
    with pytest.raises(RequestError, match="images take 8 tokens, the most allowed is 7"):
        llm.engine.add_request("two", tokens, params, media=media)
    text = open_llm(load_oracle("llama3"))
    with pytest.raises(RequestError, match="takes no images"):
        text.engine.add_request("three", tokens, params, media=media)
    with pytest.raises(RequestError, match="takes no images"):
        text.logits([1, 2], np.zeros((1, 3, 4, 4), np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_images_on_several_devices(name: str):
    llm = open_llm(load_oracle(name), tp=2)
    assert error(llm.logits(*images_of(name)), expected_logits(name)) < TOLERANCE
    tokens, media = items_of(llm, name)
    assert run(llm, "images", tokens, media)[0] == teacher_forced(llm, tokens, media)

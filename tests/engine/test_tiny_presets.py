"""Every tiny preset generates through the engine what its logits say, and those with a tower see images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.media.images import RGBImage
from jaxinfer.media.item import MediaItem
from jaxinfer.weights.presets import list_presets

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
OPTIONS = {"warm_up": False, "max_num_seqs": 2, "max_model_len": 256, "max_media_tokens": 64}
PROMPTS = [[5, 6, 7, 8] * 12, [9, 8, 7]]  # one past the windows and chunks of 32, one not


@cache
def opened(name: str) -> LLM:
    return LLM(name, **OPTIONS)


def check(llm: LLM, prompt: list[int], ids: list[int], media: Sequence[MediaItem] = ()) -> None:
    """Each token is the likeliest by the logits of the whole sequence at once."""
    logits = llm._teacher.logits(prompt + ids, list(media))
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == ids


@pytest.mark.parametrize("name", [p.name for p in list_presets() if p.kind == "random"])
def test_generates_what_its_logits_say(name: str):
    llm = opened(name)
    for prompt, out in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        check(llm, prompt, out.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["tiny-llama4", "tiny-kimi-k25"])
def test_takes_an_image(name: str):
    llm = opened(name)
    assert llm.image_processor is not None
    assert llm.model_config.image_token_id is not None
    found = []
    for seed in (0, 1):
        pixels = np.random.default_rng(seed).integers(0, 256, (50, 50, 3), np.uint8)
        item = llm.image_processor(RGBImage(pixels, bytes([seed]))).item
        prompt = [5, *[llm.model_config.image_token_id] * item.num_tokens, 6, 7]
        llm.engine.add_request(f"image {seed}", prompt, GREEDY, media=[item])
        ids: list[int] = []
        while llm.engine.has_unfinished_requests():
            for out in llm.engine.step():
                ids = out.outputs[0].token_ids
        check(llm, prompt, ids, [item])
        found.append(llm._teacher.logits(prompt, [item])[-1])
    assert not np.allclose(*found)  # it saw them

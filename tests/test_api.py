"""The Python face: every way to write prompts and parameters, and one JaxinferError for what is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import write_byte_tokenizer

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import CheckpointError, ConfigError, RequestError

OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "warm_up": False}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def bare() -> LLM:
    """A model without a tokenizer."""
    return LLM("tiny-llama", **OPTIONS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """A model with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(__file__).parent / "oracles/llama3" / name, folder / name)
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    return LLM(folder, dtype="float32", **OPTIONS)


def ids(outputs) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def refusal(call, *args, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "prompt",
    [
        (1, 2, 3),
        np.arange(1, 4),
        list(np.arange(1, 4)),
        np.arange(1, 4, dtype=np.uint8),
        jnp.arange(1, 4),
        range(1, 4),
    ],
)
def test_one_prompt_of_ids(bare: LLM, prompt):
    [out] = bare.generate(prompt, GREEDY)
    assert out.prompt_token_ids == [1, 2, 3]
    assert {type(i) for i in out.prompt_token_ids} == {int}
    assert ids([out]) == ids(bare.generate([[1, 2, 3]], GREEDY))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "prompts", [[[1, 2], [3, 4]], ((1, 2), (3, 4)), np.array([[1, 2], [3, 4]]), [np.array([1, 2]), [3, 4]]]
)
def test_several_prompts_of_ids(bare: LLM, prompts):
    assert [out.prompt_token_ids for out in bare.generate(prompts, GREEDY)] == [[1, 2], [3, 4]]


def test_texts_and_ids_together(llm: LLM):
    outputs = llm.generate(["ab", [97, 98]], GREEDY)
    assert [(out.prompt, out.prompt_token_ids) for out in outputs] == [("ab", [97, 98]), (None, [97, 98])]
    assert ids(outputs[:1]) == ids(outputs[1:])
    assert llm.generate([], GREEDY) == []
    assert ids(llm.generate("ab", GREEDY)) == ids(outputs[:1])


@pytest.mark.usefixtures("unchecked")
def test_parameters_for_all_for_each_or_recommended(llm: LLM):
    short = GREEDY.replace(max_tokens=2)
    assert [len(tokens) for tokens in ids(llm.generate(["a", "b"], (GREEDY, short)))] == [6, 2]
    assert ids(llm.generate("ab")) == ids(llm.generate("ab", SamplingParams(temperature=0)))
    assert refusal(llm.generate, ["a", "b"], [GREEDY]).param == "sampling_params"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "prompts",
    [
        None, 5, 1.5, b"ab", {"prompt": "ab"}, {1, 2}, [None], [["a"]], [[1.5, 2]], [1.5, 2], [[True, 1]], [True], [[1], 2],
        [1, "a"], ["a", 1], [{"prompt": "ab"}], [[[1]]], np.array(5), np.array([1.5]), "", [[]], "\ud800", [-1], [10**30],
    ],
)  # fmt: skip
def test_what_is_no_prompt(llm: LLM, prompts):
    assert (refusal(llm.generate, prompts, GREEDY).param or "prompt").startswith("prompt")
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("params", [{"max_tokens": 2}, 5, "x", [{"max_tokens": 2}], [None], GREEDY.replace])
def test_what_are_no_sampling_params(bare: LLM, params):
    assert refusal(bare.generate, [[1]], params).param == "sampling_params"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("salt", [5, b"x", "", "\ud800"])
def test_what_is_no_salt(bare: LLM, salt):
    assert refusal(bare.generate, [[1]], GREEDY, cache_salt=salt).param == "cache_salt"


def test_bad_words_are_texts(llm: LLM):
    allowed = SamplingParams(
        max_tokens=20, temperature=1, seed=1, allowed_token_ids=[*b"no "], ignore_eos=True
    )
    [out] = llm.generate("ab", allowed)
    assert "no" in out.outputs[0].text
    [out] = llm.generate("ab", allowed.replace(bad_words=["no"]))
    assert "n" in out.outputs[0].text
    assert "no" not in out.outputs[0].text
    [out] = llm.chat([{"role": "user", "content": "ab"}], allowed.replace(bad_words=["no"]))
    assert "no" not in out.outputs[0].text


def test_a_chat_or_several(llm: LLM):
    one = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([one, one], GREEDY)
    assert ids(llm.chat(one, GREEDY)) * 2 == ids(outputs)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(outputs[0].prompt_token_ids, skip_special_tokens=False).startswith(
        "<|im_start|>user"
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        "hi",
        {"role": "user", "content": "hi"},
        [5],
        [[]],
        [[5]],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": 5}],
    ],
)
def test_what_is_no_chat(llm: LLM, messages):
    assert refusal(llm.chat, messages, GREEDY).param == "messages"


def test_text_on_a_model_without_a_tokenizer(bare: LLM):
    assert refusal(bare.generate, "ab", GREEDY).param == "prompt"
    assert refusal(bare.chat, [{"role": "user", "content": "hi"}], GREEDY).param == "messages"
    for name in ("stop", "bad_words"):
        assert refusal(bare.generate, [[1]], GREEDY.replace(**{name: ["x"]})).param == name
    [out] = bare.generate([[1]], GREEDY)
    assert (out.outputs[0].text, len(out.outputs[0].token_ids)) == ("", 6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"max_model_len": "64"}, "max_model_len must be an integer, got '64'"),
        ({"max_model_len": 1.5}, "max_model_len must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": "2"}, "max_num_seqs must be an integer"),
        ({"warm_up": "no"}, "warm_up must be True or False"),
    ],
)
def test_settings_of_the_wrong_kind(options, says):
    with pytest.raises(ConfigError, match=says):
        LLM("tiny-llama", **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", [None, 5, "", " "])
def test_what_names_no_model(model):
    with pytest.raises(CheckpointError, match=r"the model name is empty|a model is named by"):
        LLM(model)

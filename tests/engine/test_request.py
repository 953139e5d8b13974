"""What a request may hold: each value is taken as it is meant, or refused by its field's name, at construction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.request import SamplingParams, check_request, token_ids
from jaxinfer.errors import RequestError

NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
INTEGERS = ("max_tokens", "n", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
pytestmark = pytest.mark.usefixtures("unchecked")


def made(**options: Any) -> SamplingParams:
    return SamplingParams(**options)


def refusal(make, *args, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(*args, **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in INTEGERS for value in ("2", 1.0, True, [1], np.float32(1), math.nan)),
        *((name, value) for name in NUMBERS for value in ("1", True, [1.0], math.nan, math.inf, 10**400, 2j)),
        *((name, None) for name in ("n", "top_k", "min_tokens", *NUMBERS)),
        *((name, -2) for name in INTEGERS if name != "seed"),
        *((name, -2.1) for name in NUMBERS),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("n", 1025),
        ("logprobs", 21),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("top_p", 0.0),
        ("temperature", 2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [""]),
        ("stop", b"x"),
        ("stop", ["\ud800"]),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 17),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", np.array(5)),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", "ab"),
        ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", []),
        ("bad_words", "no"),
        ("bad_words", [5]),
        ("bad_words", [" "]),
        ("bad_words_ids", 5),
        ("bad_words_ids", [5]),
        ("bad_words_ids", ["ab"]),
        ("bad_words_ids", [[1.5]]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[-1]]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(field, value):
    assert refusal(SamplingParams, **{field: value}).param == field


def test_numpy_s_numbers_become_python_s():
    params = made(
        **{name: np.int64(2) for name in INTEGERS},
        **{name: np.float32(1.0) for name in NUMBERS},
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=np.arange(3, dtype=np.uint16),
        bad_words_ids=np.array([[1, 2], [3, 4]]),
        logit_bias={np.int32(5): np.float32(0.5)},
    )
    assert {type(getattr(params, name)) for name in INTEGERS} == {int}
    assert {type(getattr(params, name)) for name in NUMBERS} == {float}
    ids = [*params.stop_token_ids, *(params.allowed_token_ids or ()), *itertools.chain(*params.bad_words_ids)]
    assert ids == [1, 2, 0, 1, 2, 1, 2, 3, 4]
    assert {type(i) for i in ids} == {int}
    assert repr(params.logit_bias) == "{5: 0.5}"


def test_collections_may_be_of_any_kind_or_none():
    params = made(stop="end", stop_token_ids=None, bad_words=("x",), allowed_token_ids=range(3))
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("end",), (), ("x",))
    assert params.allowed_token_ids == (0, 1, 2)
    assert made(stop=None).stop == ()


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0, 0), (1e-300, 0), (9e-6, 0), (1e-5, 0.01), (0.009, 0.01), (0.01, 0.01), (0.02, 0.02), (2, 2)],
)
def test_small_temperatures_are_greedy_or_raised(given, kept):
    params = SamplingParams(temperature=given)
    assert (params.temperature, params.greedy) == (kept, kept == 0)


def test_greedy_has_one_completion():
    for temperature in (0, 1e-6):
        assert refusal(SamplingParams, temperature=temperature, n=2).param == "n"


def test_spellings_of_off():
    params = SamplingParams(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


def test_everything_kept_fits_the_device():
    """The step's arrays hold 32-bit integers and floats."""
    assert np.int32(SamplingParams(top_k=10**30).top_k) == 2**31 - 1
    for penalty in (0.01, 100.0):
        assert np.isfinite(
            np.float32(1e30) * np.float32(SamplingParams(repetition_penalty=penalty).repetition_penalty)
        )


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(-1),
            "repetition_penalty": st.floats(0.01, 100),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "logit_bias": st.dictionaries(st.integers(0), st.floats(-100, 100)),
            "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=16),
            "bad_words_ids": st.lists(st.lists(st.integers(0), min_size=1)),
        },
    )
)
def test_what_is_kept_is_valid_and_stays_as_it_is(options):
    params = SamplingParams(**options)
    assert SamplingParams(**{f.name: getattr(params, f.name) for f in dataclasses.fields(params)}) == params
    for name in NUMBERS:
        assert math.isfinite(np.float32(getattr(params, name)))


def test_ids_are_checked_against_a_vocabulary():
    for field, value in {
        "stop_token_ids": [9],
        "allowed_token_ids": [9],
        "bad_words_ids": [[1, 9]],
        "logit_bias": {9: 1},
    }.items():
        params = made(**{field: value})
        params.check_vocab(10)
        assert refusal(params.check_vocab, 9).param == field


def test_the_engine_takes_no_bad_words_as_text():
    assert refusal(SamplingParams(bad_words=["x"]).check_vocab, 10).param == "bad_words"


@pytest.mark.parametrize(
    "value", [[3, 1], (3, 1), np.array([3, 1]), np.array([3, 1], np.uint8), [np.int64(3), 1], iter([3, 1])]
)
def test_token_ids(value):
    ids = token_ids(value)
    assert ids == [3, 1]
    assert {type(i) for i in ids} == {int}


@pytest.mark.parametrize(
    "value",
    [
        None, 5, "abc", b"abc", {1: 2}, {1, 2}, [1.5, 2], [1.0], [True, 1], ["a"], [None], [[1, 2]],
        np.array([1.0]), np.array([[1, 2]]), np.array([True]), np.array(5), np.array("abc"),
    ],
)  # fmt: skip
def test_what_are_no_token_ids(value):
    assert refusal(token_ids, value, "field").param == "field"


def test_a_prompt_is_copied():
    ids = [1, 2]
    assert check_request(ids, 0, None) == ids
    assert check_request(ids, 0, None) is not ids


@pytest.mark.parametrize(
    ("param", "prompt", "priority", "salt"),
    [
        ("prompt", [1.5], 0, None),
        ("priority", [1], "x", None),
        ("priority", [1], 1.0, None),
        ("priority", [1], None, None),
        ("priority", [1], 2**63, None),
        ("cache_salt", [1], 0, 5),
        ("cache_salt", [1], 0, b"x"),
        ("cache_salt", [1], 0, ""),
        ("cache_salt", [1], 0, "\ud800"),
    ],
)
def test_what_else_a_request_may_not_hold(param, prompt, priority, salt):
    assert refusal(check_request, prompt, priority, salt).param == param


def test_what_else_a_request_may_hold():
    assert check_request(np.array([1, 2]), np.int64(-3), "tenant é") == [1, 2]
    assert check_request([], 0, None) == []

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.protocol import types
from jaxinfer.protocol.convert import read

USER = {"role": "user", "content": "hello"}


def refusal(value: Any, type_: type = types.CompletionBody) -> RequestError:
    if isinstance(value, dict) and type_ is types.CompletionBody:
        value = {"prompt": "x", **value}
    with pytest.raises(RequestError) as caught:
        read(value, type_)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("value", ["5", True, 5.0, [5], {}, math.inf])
def test_integers_are_not_converted(value):
    error = refusal({"top_k": value})
    assert str(error).startswith("top_k must be an integer, got ")
    assert error.param == "top_k"


@pytest.mark.parametrize("value", ["1", True, 10**400, [1.0]])
def test_numbers_are_finite_and_not_converted(value):
    assert "must be a finite number, got" in str(refusal({"temperature": value}))


@pytest.mark.parametrize("value", [1, 0, "true", [True]])
def test_booleans_are_not_converted(value):
    assert "must be true or false, got" in str(refusal({"echo": value}))


@pytest.mark.parametrize("key", ["x", "1.0", " 1", "+1", "-1", "1_0", "٣", "", "9" * 19, "1\n"])
def test_keys_of_a_bias_are_plain_decimal(key):
    assert str(refusal({"logit_bias": {key: 1.0}})) == "logit_bias: each key must be a token id"


@pytest.mark.parametrize(
    ("value", "type_", "param", "says"),
    [
        (5, types.ChatBody, None, "the request must be a JSON object, got 5"),
        ({}, types.ChatBody, "messages", "messages is missing"),
        ({"messages": []}, types.ChatBody, "messages", "messages must not be empty"),
        ({"messages": [USER, 5]}, types.ChatBody, "messages[1]", "messages[1] must be a JSON object, got 5"),
        ({"messages": [{"role": 5}]}, types.ChatBody, "messages[0].role", "must be a string, got 5"),
        ({"n": 0}, types.CompletionBody, "n", "n must be at least 1, got 0"),
        ({"temperature": 2.5}, types.CompletionBody, "temperature", "temperature must be at most 2, got 2.5"),
        ({"top_p": 0}, types.CompletionBody, "top_p", "top_p must be more than 0, got 0"),
        ({"stop": 5}, types.CompletionBody, "stop", "stop must be a string or an array, got 5"),
        ({"stop": ["a"] * 17}, types.CompletionBody, "stop", "stop must have at most 16 items, got 17"),
        ({"seed": 2**63}, types.CompletionBody, "seed", "must be at most 9223372036854775807"),
        ({"logit_bias": {"1": 101}}, types.CompletionBody, "logit_bias", "each value must be at most 100"),
        ({"cache_salt": "a/b"}, types.CompletionBody, "cache_salt", "without @, /, \\ and NUL, got 'a/b'"),
        (
            {"messages": [USER], "tool_choice": "x"},
            types.ChatBody,
            "tool_choice",
            "tool_choice must be auto, none or required, got 'x'",
        ),
        (
            {"messages": [USER], "tools": [{"type": "x"}]},
            types.ChatBody,
            "tools[0].type",
            "tools[0].type must be function, got 'x'",
        ),
        (
            {"response_format": {"type": "yaml"}},
            types.CompletionBody,
            "response_format.type",
            "must be text, json_object or json_schema, got 'yaml'",
        ),
        (
            {"input_file_id": "x", "endpoint": "/v1/completions", "metadata": {"a" * 65: "b"}},
            types.BatchBody,
            "metadata",
            "metadata: each key must have at most 64 characters",
        ),
    ],
)
def test_the_place_and_what_must_be(value, type_, param, says):
    error = refusal(value, type_)
    assert error.param == param
    assert says in str(error)
    assert error.code is None


def test_a_part_that_is_not_taken_has_a_code_of_its_own():
    error = refusal({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, types.ChatBody)
    assert (error.param, error.code) == ("messages[0].content[0].type", "unsupported_content")
    assert "must be text, input_text, output_text, image_url or input_image" in str(error)
    error = refusal({"input": [{"type": "computer_call"}]}, types.ResponsesBody)
    assert (error.param, error.code) == ("input[0].type", "unsupported_content")


def test_values_that_look_like_msgspecs_words_change_nothing():
    error = refusal({"messages": [USER], "tool_choice": "x' - at `$.evil`"}, types.ChatBody)
    assert error.param == "tool_choice"


def test_long_values_are_cut_in_messages():
    assert len(str(refusal({"n": "x" * 10_000}))) < 120


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_whatever_is_wrong_the_error_names_a_field_of_the_type(data):
    type_ = data.draw(
        st.sampled_from([types.ChatBody, types.CompletionBody, types.ResponsesBody, types.BatchBody])
    )
    body = data.draw(st.dictionaries(st.sampled_from(type_.__struct_fields__), _values, max_size=4))
    param, message = "", ""
    try:
        read(body, type_)
    except RequestError as error:
        param, message = error.param or "nothing", str(error)
    assert param.split(".")[0].split("[")[0] in ("", *type_.__struct_fields__)
    assert message.startswith(param)

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import Fields, parse_json

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_json_values)
def test_reads_what_json_wrote(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_request_error(data):
    message = ""
    try:
        parse_json(data)
    except RequestError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"prompt": "x}', "Unterminated string starting at character 11$"),
        (b'"\x01"', "Invalid control character at character 1$"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 1}}', "twice"),
        (b'"\\ud83d"', "surrogate"),
        (b'"\xff"', "UTF-8"),
        (b"[" * 200_000, "nested"),
        (b"9" * 5000, "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused_by_name(text, says):
    with pytest.raises(RequestError, match=says):
        parse_json(text)


def test_a_whole_surrogate_pair_is_a_character():
    assert parse_json('"\\ud83d\\ude00"') == "😀"


@pytest.mark.parametrize("value", ["5", True, 5.0, [5], {}, math.inf])
def test_integers_are_not_converted(value):
    with pytest.raises(RequestError, match="must be an integer") as caught:
        Fields({"top_k": value}).integer("top_k")
    assert caught.value.param == "top_k"


@pytest.mark.parametrize("value", ["1", True, math.inf, math.nan, 10**400, [1.0]])
def test_numbers_are_finite_and_not_converted(value):
    with pytest.raises(RequestError, match="must be a finite number"):
        Fields({"x": value}).number("x")


@pytest.mark.parametrize("value", [1, 0, "true", [True]])
def test_booleans_are_not_converted(value):
    with pytest.raises(RequestError, match="must be true or false"):
        Fields({"x": value}).boolean("x")


@pytest.mark.parametrize("key", ["x", "1.0", " 1", "+1", "1_0", "٣", "", "9" * 19])
def test_integer_keys_are_plain_decimal(key):
    with pytest.raises(RequestError, match="keys must be token ids"):
        Fields({"logit_bias": {key: 1.0}}).integer_map("logit_bias")


def test_integer_map_reads_negative_keys_for_others_to_judge():
    assert Fields({"b": {"-1": 2, "7": 0.5}}).integer_map("b") == {-1: 2, 7: 0.5}


def test_null_is_absent_and_paths_are_in_names():
    fields = Fields({"a": None, "b": 1}, "messages[2]")
    assert fields.integer("a", 9) == 9
    assert not fields.has("a")
    with pytest.raises(RequestError) as caught:
        fields.string("b")
    assert caught.value.param == "messages[2].b"
    assert "messages[2].b must be a string, got 1" in str(caught.value)


def test_long_values_are_cut_in_messages():
    with pytest.raises(RequestError) as caught:
        Fields({"n": "x" * 10_000}).integer("n")
    assert len(str(caught.value)) < 120

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import parse_json

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
        (b'{"a": [1e400]}', "1e400 is out of range"),
        (b"-9" + b"9" * 400 + b".0", "out of range"),
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

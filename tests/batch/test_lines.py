from __future__ import annotations

import io
import json

import pytest

from jaxinfer.batch import lines as lines_module
from jaxinfer.batch.lines import LineParser, read_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}


def read(data: bytes, settings: str = ""):
    return list(read_lines(io.BytesIO(data), settings))


def parse(*items, openai_defaults=None, plain_defaults=None):
    data = b"\n".join(item if isinstance(item, bytes) else json.dumps(item).encode() for item in items)
    parser = LineParser(openai_defaults or {}, plain_defaults or {})
    return [parser.parse(line) for line in read(data)]


def test_blank_lines_count_but_are_skipped():
    lines = read(b"\xef\xbb\xbfa\r\n\n  \nb\n\n")
    assert [(line.number, line.data) for line in lines] == [(1, b"a"), (4, b"b")]


def test_ids_depend_on_place_content_and_settings_only():
    base = read(b"a\na\n")
    assert base == read(b"a\r\na")
    assert base[0].id != base[1].id
    assert {line.id for line in base}.isdisjoint(line.id for line in read(b"b\nb\n"))
    assert {line.id for line in base}.isdisjoint(line.id for line in read(b"a\na\n", "other settings"))


def test_a_line_beyond_the_limit_is_not_held(monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10)
    lines = read(b"x" * 35 + b"\nshort\n" + b"y" * 9 + b"\n" + b"z" * 10)
    assert [(line.number, len(line.data), line.too_long) for line in lines] == [
        (1, 10, True),
        (2, 5, False),
        (3, 9, False),
        (4, 10, False),
    ]
    assert lines[0].id != read(b"x" * 34 + b"\n")[0].id
    error = LineParser({}, {}).parse(lines[0]).error
    assert error is not None
    assert error.code == "line_too_long"


def test_each_form_has_its_defaults():
    plain = {"prompt": "x"}
    openai, plain = parse(
        GOOD, plain, openai_defaults={"temperature": 0.7}, plain_defaults={"temperature": 0.0}
    )
    assert (openai.openai, openai.custom_id) == (True, "a")
    assert openai.request is not None
    assert openai.request.sampling.temperature == 0.7
    assert (plain.openai, plain.custom_id) == (False, None)
    assert plain.request is not None
    assert plain.request.sampling.greedy


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"custom_id": None}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"method": None}, "method"),
        ({"method": "GET"}, "method"),
        ({"url": None}, "url"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": 5}, "url"),
        ({"body": None}, "body"),
    ],
)
def test_a_fault_around_the_body(change, param):
    (line,) = parse(GOOD | change)
    assert line.error is not None
    assert (line.error.param, line.in_body, line.request) == (param, False, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ("x", None),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "temperature": 9}, "temperature"),
        ({}, "prompt"),
    ],
)
def test_a_fault_in_the_body_keeps_the_custom_id(body, param):
    (line,) = parse(GOOD | {"body": body})
    assert line.error is not None
    assert (line.error.param, line.in_body, line.custom_id) == (param, True, "a")


def test_the_second_use_of_a_custom_id_is_the_wrong_one():
    first, second, third = parse(GOOD, {"custom_id": "a", "prompt": "y"}, GOOD | {"custom_id": "b"})
    assert first.error is None
    assert third.error is None
    assert second.error is not None
    assert (second.error.param, second.custom_id) == ("custom_id", "a")


@pytest.mark.parametrize("data", [b'{"custom_id": "a", "x": NaN}', b'{"custom_id": "a", "custom_id": "a"}'])
def test_a_line_that_is_nearly_json_keeps_its_custom_id(data):
    broken, again = parse(data, GOOD)
    assert (broken.custom_id, broken.error is None) == ("a", False)
    assert again.error is not None


@pytest.mark.parametrize(
    "data", [b"nonsense", b"[]", b"5", b'"x"', b"\xff", b'{"custom_id": "\\ud800"}', b"[" * 99999]
)
def test_a_line_that_is_no_object(data):
    (line,) = parse(data)
    assert line.error is not None
    assert (line.request, line.custom_id, line.number, line.error.param) == (None, None, 1, None)


def test_lines_are_bounded_as_bodies_are():
    """One is parsed beside requests that are being served."""
    line = b'{"prompt": [' + b"[]," * 200_000 + b"[]]}"
    [read] = read_lines(io.BytesIO(line))
    error = LineParser({}, {}).parse(read).error
    assert error is not None
    assert "more than 100000 arrays" in str(error)

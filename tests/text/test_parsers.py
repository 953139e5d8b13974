"""What models write, cut at any place: reasoning, tool calls and content come out the same. B-numbers: public bug reports."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    guess_reasoning_parser,
    guess_tool_parser,
    make_output_parser,
)

Parsed = tuple[str, str, list[tuple[str, Any]]]


def parse(
    text: str, tool: str | None, reasoning: str | None = None, cuts: tuple[int, ...] = (), prompt: str = ""
) -> Parsed:
    """(reasoning, content, calls) of a text that arrives cut at the given places."""
    parser = make_output_parser(tool, reasoning, prompt=prompt)
    places = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    deltas = [d for a, b in itertools.pairwise(places) for d in parser.push(text[a:b])]
    deltas += parser.finish()
    calls = [(d.name, json.loads(d.text)) for d in deltas if d.kind == "call"]
    assert parser.num_calls == len(calls)
    joined = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")}
    return joined["reasoning"], joined["content"], calls


K = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI = f'{K[0]}{K[1]}functions.get_weather:0{K[2]}{{"city": "北京"}}{K[3]}{K[1]}functions.f.g:1{K[2]}{{}}{K[3]}<|tool_calls_section_end|>'
BIG = json.dumps({"text": "x" * 20_000})

# tool parser, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "</x>"}]}}\n</tool_call>',
        "",
        [("f", {"a": [1, {"b": "</x>"}]})],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>\n',
        "Let me see.",
        [("f", {}), ("g", {"x": 1})],
    ),
    (
        "qwen3",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        "",
        [("f", {"a": 1})],
    ),  # cut off before its end tag
    ("hermes", "<tool_call>not json</tool_call> and on", "<tool_call>not json</tool_call> and on", []),
    ("hermes", "plain <tool_cal", "plain <tool_cal", []),
    ("hermes", "a </tool_call> b", "a </tool_call> b", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": null}}',
        "",
        [("f", {}), ("g", {"x": None})],
    ),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", "Hello {", "Hello {", []),
    ("kimi_k2", KIMI, "", [("get_weather", {"city": "北京"}), ("f.g", {})]),
    ("kimi_k2", "I will look." + KIMI, "I will look.", [("get_weather", {"city": "北京"}), ("f.g", {})]),
    (
        "kimi_k2",
        f'{K[0]}{K[1]}\nfunctions.f:0\n{K[2]}\n{{"a": 1}}\n{K[3]}',
        "",
        [("f", {"a": 1})],
    ),  # B36: newlines in the id
    (
        "kimi_k2",
        f"{K[0]}{K[1]}functions.f:0{K[2]}{BIG}{K[3]}",
        "",
        [("f", {"text": "x" * 20_000})],
    ),  # B36: over 8 KB
    ("kimi_k2", f'text{K[0]}{K[1]}functions.f:0{K[2]}{{"a": ', 'textfunctions.f:0{"a": ', []),
    ("llama4_pythonic", '[f(a="b")]', "", [("f", {"a": "b"})]),
    (
        "llama4_pythonic",
        'Sure: [f(a="b]c", n=-1.5, ok=true, none=null), g.h()]',
        "Sure: ",
        [("f", {"a": "b]c", "n": -1.5, "ok": True, "none": None}), ("g.h", {})],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[f(a=[[1, 2], {'k': [None, False]}])]<|python_end|>",
        "",
        [("f", {"a": [[1, 2], {"k": [None, False]}]})],
    ),
    ("llama4_pythonic", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (
        "llama4_pythonic",
        '<|python_start|>{"type": "function", "name": "f", "parameters": {}}<|python_end|>',
        "",
        [("f", {})],
    ),
    ("llama4_pythonic", 'see [f(a="b"', 'see [f(a="b"', []),
    ("llama4_pythonic", "a list [1, 2] and {x}", "a list [1, 2] and {x}", []),
    ("llama4_pythonic", "[f(__import__('os').system('x'))]", "[f(__import__('os').system('x'))]", []),
]


@pytest.mark.parametrize(("tool", "text", "content", "calls"), CASES)
def test_what_a_text_means(tool: str, text: str, content: str, calls: list):
    assert parse(text, tool) == ("", content, calls)
    assert parse(text, tool, cuts=tuple(range(min(len(text), 400)))) == ("", content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=12))
def test_b36_any_cut_gives_the_whole_text_s_result(case, cuts):
    tool, text, content, calls = case
    assert parse(text, tool, cuts=tuple(cuts)) == ("", content, calls)


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        *K,
        "<|tool_calls_section_end|>",
        "<|python_start|>",
        "<|python_end|>",
        "<|python_tag|>",
        '{"name": "f", "arguments": {}}',
        '[f(a="b")]',
        "[",
        "{",
        '"',
        "f(",
        ")",
        "]",
        "}",
        "functions.f:0",
        "\n",
        " ",
        "<",
        "|",
        "text",
        "北",
        "\\",
        "'",
        "<thi",
        "nk>",
    ]
)


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.sampled_from([None, "qwen3"]),
    st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
def test_any_text_at_all_parses_the_same_however_it_is_cut(tool, reasoning, text, cuts, inside):
    prompt = "<think>\n" if inside else ""
    assert parse(text, tool, reasoning, tuple(cuts), prompt) == parse(text, tool, reasoning, (), prompt)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.", "\nhm\n", "Yes."),
        ("<think>\n", "hm\n</think>\n\nYes.", "hm\n", "Yes."),  # B38: the template opened it
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),  # B38: thinking switched off
        ("", "Yes.", "", "Yes."),
        ("", "\n Yes <think> no </think>", "", "\n Yes <think> no </think>"),
        ("<think>", "all of it", "all of it", ""),  # B38: cut off before the end
        ("", "<think>all of it", "all of it", ""),
        ("", "", "", ""),
        ("", "  ", "", "  "),
    ],
)
def test_b38_reasoning(name: str, prompt: str, text: str, reasoning: str, content: str):
    assert parse(text, None, name, tuple(range(len(text))), prompt) == (reasoning, content, [])


def test_reasoning_then_calls():
    text = '<think>I need f <tool_call></think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, "qwen3", "qwen3", tuple(range(len(text)))) == ("I need f <tool_call>", "", [("f", {})])


def test_a_template_names_its_parsers():
    assert guess_tool_parser("... <tool_call> ...") == "hermes"
    assert guess_tool_parser("<|python_tag|> {{ x }}") == "llama3_json"
    assert guess_tool_parser("<|tool_calls_section_begin|><tool_call>") == "kimi_k2"
    assert guess_tool_parser("plain") is None
    assert guess_reasoning_parser("{{ '<think></think>' }}") == "qwen3"
    assert guess_reasoning_parser("plain") is None

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


def strict_json(text: str) -> Any:
    """As a client reads it: UTF-8, and no NaN or Infinity."""

    def refuse(constant: str):
        raise ValueError(constant)

    return json.loads(text.encode(), parse_constant=refuse)


def parse(
    text: str, tool: str | None, reasoning: str | None = None, cuts: tuple[int, ...] = (), prompt: str = ""
) -> Parsed:
    """(reasoning, content, calls) of a text that arrives cut at the given places."""
    parser = make_output_parser(tool, reasoning, prompt=prompt)
    places = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    deltas = [d for a, b in itertools.pairwise(places) for d in parser.push(text[a:b])]
    deltas += parser.finish()
    calls = [(d.name, strict_json(d.text)) for d in deltas if d.kind == "call"]
    assert parser.num_calls == len(calls)
    assert all(d.call_id for d in deltas if d.kind == "call")
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
    ("hermes", "plain \n", "plain \n", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone. ',
        "\nDone. ",
        [("f", {})],
    ),
    (
        "qwen3",
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),  # an end tag is missing
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        "",
        [("f", {"a": "\ud83d"})],
    ),  # half a character, which UTF-8 cannot spell
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        [],
    ),
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
    ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    (
        "llama3_json",
        'Let me see. <|python_tag|>{"name": "f", "parameters": {}} and so on',
        "Let me see. and so on",
        [("f", {})],
    ),
    (
        "llama3_json",
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": "}]"}}]',
        "",
        [("f", {}), ("g", {"a": "}]"})],
    ),
    ("llama3_json", "<|python_tag|>print(1)", "print(1)", []),
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
    (
        "kimi_k2",
        f'{K[0]}{K[1]}functions.f:0{K[2]}{{"a": "x\ny"}}{K[3]}',
        "",
        [("f", {"a": "x\ny"})],
    ),  # a line end as it is, which strict JSON forbids
    (
        "kimi_k2",
        f"<|tool_call_section_begin|>{K[1]}f:3{K[3]}<|tool_call_section_end|>Done",
        "Done",
        [("f", {})],
    ),
    ("kimi_k2", f"{K[0]}I cannot do that", "I cannot do that", []),
    ("kimi_k2", f"{K[0]}{K[1]}functions.get_wea", "functions.get_wea", []),  # cut off in the name
    ("kimi_k2", f"{K[0]}{K[1]}functions.f:0{K[2]}", "functions.f:0", []),  # cut off before its arguments
    ("kimi_k2", f'{K[0]}{K[1]}functions.f:0{K[2]}{{"a": NaN}}{K[3]}', 'functions.f:0{"a": NaN}', []),
    ("kimi_k2", f'text{K[0]}{K[1]}functions.f:0{K[2]}{{"a": ', 'textfunctions.f:0{"a": ', []),
    ("llama4_pythonic", '[f(a="b")]', "", [("f", {"a": "b"})]),
    (
        "llama4_pythonic",
        'Sure: [f(a="b]c", n=-1.5, ok=true, none=null), g.h()]',
        "Sure:",
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
    ("llama4_pythonic", '<|python_start|>[f(a="b")<|python_end|>', '[f(a="b")', []),
    ("llama4_pythonic", "so it is<|python_end|>", "so it is", []),
    ("llama4_pythonic", "[f(<|python_end|>a=1)]", "[f(a=1)]", []),
    ("llama4_pythonic", "[<|python_start|>[f (a=1)]<|python_end|>", "[", [("f", {"a": 1})]),
    ("llama4_pythonic", "[f(a=1)] ; ;\u2003, [g()]", "", [("f", {"a": 1}), ("g", {})]),
    ("llama4_pythonic", "[f(a=1)] ; ;\u2003, x", " ; ;\u2003, x", [("f", {"a": 1})]),
    (
        "llama4_pythonic",
        'Given {"a": 1} and x[i(0)]: [f(a="b")]',
        'Given {"a": 1} and x[i(0)]:',
        [("f", {"a": "b"})],
    ),  # B39: what is no call does not hide the one after it
    (
        "llama4_pythonic",
        '<|python_start|>[f(a="b")]<|python_end|> then <|python_start|>[g(a=1)]<|python_end|>',
        " then",
        [("f", {"a": "b"}), ("g", {"a": 1})],
    ),
    (
        "llama4_pythonic",
        '[get-flights(from="Oslo", class=\'2"\', nested=[[{"a": (1, 2.5e3,)}], []],)]',
        "",
        [("get-flights", {"from": "Oslo", "class": '2"', "nested": [[{"a": [1, 2500.0]}], []]})],
    ),
    (
        "llama4_pythonic",
        r'[f(pattern="\d+\\", line="a\n\u00e9\x41", q="\"")]',
        "",
        [("f", {"pattern": "\\d+\\", "line": "a\né" + "A", "q": '"'})],
    ),
    ("llama4_pythonic", "[f(a=\"one \" 'two')]", "", [("f", {"a": "one two"})]),
    ("llama4_pythonic", '[f(a="\\ud83d\\ude00")]', "", [("f", {"a": "😀"})]),
    *(
        ("llama4_pythonic", text, text, [])
        for text in (
            "[f(1)]",
            "[f(a=1e999)]",
            "[f(a=g())]",
            "[f(a=b)]",
            "[f(a=1 2)]",
            "[f(a=[1}])]",
            "[f(a=1)) and on",
            '[f(a="\\UFFFFFFFF")]',
            "[f(a={[]: 1})]",
            "[f(a=" + "9" * 5000 + ")]",
            "[f(a=" + "[" * 5000 + "]" * 5000 + ")]",
            "[f(a=" + "-" * 5000 + "1)]",
            '{"name": "f", "parameters": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        )
    ),
    ("llama4_pythonic", "a list [1, 2] and {x}", "a list [1, 2] and {x}", []),
    ("llama4_pythonic", "[f(__import__('os').system('x'))]", "[f(__import__('os').system('x'))]", []),
]


@pytest.mark.parametrize(("tool", "text", "content", "calls"), CASES, ids=range(len(CASES)))
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
        "functions.",
        '"name": "f", "parameters": {',
        "NaN",
        "\\ud83d",
        "a=",
        ",",
        ";",
    ]
)
NEVER_SHOWN = {
    "kimi_k2": ("<|tool_call", "section_begin|>"),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "llama3_json": ("<|python_tag|>",),
}


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.sampled_from([None, "qwen3"]),
    st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
def test_any_text_at_all_parses_the_same_however_it_is_cut(tool, reasoning, text, cuts, inside):
    prompt = "<think>\n" if inside else ""
    whole = parse(text, tool, reasoning, (), prompt)
    assert parse(text, tool, reasoning, tuple(cuts), prompt) == whole
    assert parse(text, tool, reasoning, tuple(range(len(text))), prompt) == whole


@given(st.sampled_from(sorted(NEVER_SHOWN)), st.lists(PIECES, max_size=14))
def test_b36_b39_markers_are_never_shown(tool: str, pieces: list[str]):
    # Ends of pieces may not join to a marker that is none.
    _, content, _ = parse("\x00".join(pieces), tool)
    assert not [marker for marker in NEVER_SHOWN[tool] if marker in content]


@given(st.sampled_from(sorted(TOOL_PARSERS)), st.text(alphabet="ab \n.,-", max_size=40))
def test_plain_text_stays_as_it_is(tool: str, text: str):
    assert parse(text, tool, cuts=tuple(range(len(text)))) == ("", text, [])


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
@pytest.mark.parametrize(
    ("start", "more"), [("[", "aaaa"), ("[{", "   x"), ("[f", "    x"), ("a <", "<|too")]
)
def test_what_cannot_be_a_call_any_more_is_not_held_back(tool: str, start: str, more: str):
    parser = make_output_parser(tool, None)
    pieces = [start, *[more] * 500]
    shown = sum(len(d.text) for piece in pieces for d in parser.push(piece))
    assert sum(map(len, pieces)) - shown < 300


def test_a_call_is_known_as_soon_as_it_ends():
    for tool, text, rest in (
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "x"),
        ("llama3_json", '{"name": "f", "parameters": {}}', "x"),
        ("llama4_pythonic", "[f(a=1)]", "x"),
        ("kimi_k2", f"{K[1]}f:0{K[2]}{{}}{K[3]}", "x"),
    ):
        parser = make_output_parser(tool, None)
        assert [d.name for d in parser.push(text)] == ["f"]
        assert [d.text for d in parser.push(rest)] == ["x"]


def test_kimi_keeps_the_model_s_own_id_and_arguments():
    [made] = make_output_parser("kimi_k2", None).push(f'{K[1]} functions.f:7 {K[2]} {{"a":1}} {K[3]}')
    assert (made.call_id, made.text) == ("functions.f:7", '{"a":1}')


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
        # B38: the user wrote the tag, the template did not
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "A tag.", "", "A tag."),
        ("<｜User｜>What is </think>?<｜Assistant｜><think>\n", "hm</think>A tag.", "hm", "A tag."),
        ("<|im_start|>assistant\n<think>\nIt is", " so</think>Yes.", " so", "Yes."),  # a prefill, continued
    ],
)
def test_b38_reasoning(name: str, prompt: str, text: str, reasoning: str, content: str):
    assert parse(text, None, name, tuple(range(len(text))), prompt) == (reasoning, content, [])


def test_reasoning_then_calls():
    text = '<think>I need f <tool_call></think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, "qwen3", "qwen3", tuple(range(len(text)))) == ("I need f <tool_call>", "", [("f", {})])


@pytest.mark.parametrize("end", ["", "</think>", "<|tool_calls_section_end|></think>\n"])
@pytest.mark.parametrize("section", [K[0], "<|tool_call_section_begin|>", ""])
def test_kimi_s_reasoning_may_end_in_a_call(section: str, end: str):
    text = f'<think>I need f.{section}{K[1]}functions.f:0{K[2]}{{"a": "</x>"}}{K[3]}{end}'
    assert parse(text, "kimi_k2", "kimi_k2", tuple(range(len(text)))) == (
        "I need f.",
        "",
        [("f", {"a": "</x>"})],
    )


def test_a_template_names_its_parsers():
    for template, parser in (
        ("{% if tools %} <tool_call> ", "hermes"),
        ("{% if tools %} <tool_call><function=", None),  # Qwen 3 Coder: another notation
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ('{{ tools }} {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        (
            '<|header_start|> {{ tools }} {"name": function name, "parameters": dictionary',
            "llama4_pythonic",
        ),
        ("{{ tools }} <|tool_calls_section_begin|><tool_call>", "kimi_k2"),
        ("<|header_start|> {{ messages }}", None),
        ("plain", None),
    ):
        assert guess_tool_parser(template) == parser
    assert guess_reasoning_parser("{{ '<think></think>' }}") == "qwen3"
    assert guess_reasoning_parser("<|tool_calls_section_begin|> </think>") == "kimi_k2"
    assert guess_reasoning_parser("plain") is None

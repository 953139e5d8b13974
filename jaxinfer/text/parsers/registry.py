"""Parsers by name, and which one a model's chat template speaks for."""

from __future__ import annotations

import re

from jaxinfer.text.parsers.bare import Llama3Calls, Llama4Calls
from jaxinfer.text.parsers.base import NoTools, ToolParser
from jaxinfer.text.parsers.kimi import KIMI_STARTS, KimiCalls
from jaxinfer.text.parsers.output import REASONING_END, REASONING_START, OutputParser, Reasoning
from jaxinfer.text.parsers.tagged import TaggedCalls

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": TaggedCalls,
    "qwen3": TaggedCalls,
    "llama3_json": Llama3Calls,
    "llama4_pythonic": Llama4Calls,
    "kimi_k2": KimiCalls,
}
# All of them write <think>…</think>: what else ends their reasoning. Kimi K2 often calls without closing the tag.
_REASONING_ENDS: dict[str, tuple[str, ...]] = {"qwen3": (), "deepseek_r1": (), "kimi_k2": KIMI_STARTS}
REASONING_PARSERS = tuple(_REASONING_ENDS)

# In a template's source: its parser. The first that is found counts.
_TOOL_SIGNS = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|python_start|>": "llama4_pythonic",
    "<|header_start|>": "llama4_pythonic",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary': "llama3_json",  # how Llama 3.2 is told to write calls
    "<function=": None,  # Qwen 3 Coder's own notation, in <tool_call> tags too
    "<tool_call>": "hermes",
}
_CONTROL = re.compile(r"<[|｜][^<>]*[|｜]>")  # a turn's end or beginning, as templates write them


def make_output_parser(
    tool_parser: str | None, reasoning_parser: str | None, *, prompt: str = ""
) -> OutputParser:
    """A parser for one completion.

    Args:
      tool_parser: None when the request has no tools: then nothing is taken for a call.
      prompt: the end of the rendered prompt, control tokens included; where its last turn opens <think> without closing it,
        the text begins inside.
    """
    reasoning = None
    if reasoning_parser is not None:
        turn = _CONTROL.split(prompt)[-1]  # a user may have written the tag as well
        inside = turn.rfind(REASONING_START) > turn.rfind(REASONING_END)
        reasoning = Reasoning(inside=inside, ends=_REASONING_ENDS[reasoning_parser])
    return OutputParser(reasoning, TOOL_PARSERS[tool_parser]() if tool_parser else NoTools())


def guess_tool_parser(template: str) -> str | None:
    """The parser for the notation that a template teaches; None if it knows no tools, or in none of ours."""
    if "tools" not in template:
        return None
    return next((parser for sign, parser in _TOOL_SIGNS.items() if sign in template), None)


def guess_reasoning_parser(template: str) -> str | None:
    if REASONING_END not in template:
        return None
    return "kimi_k2" if KIMI_STARTS[0] in template else "qwen3"

"""Parsers by name, and which one a model's chat template speaks for."""

from __future__ import annotations

from jaxinfer.text.parsers.base import NoTools, OutputParser, Reasoning, ToolParser
from jaxinfer.text.parsers.json_calls import BareCalls, TaggedCalls
from jaxinfer.text.parsers.kimi import KimiCalls
from jaxinfer.text.parsers.pythonic import PythonicCalls

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": TaggedCalls,
    "qwen3": TaggedCalls,
    "llama3_json": BareCalls,
    "llama4_pythonic": PythonicCalls,
    "kimi_k2": KimiCalls,
}
REASONING_PARSERS = ("qwen3", "deepseek_r1", "kimi_k2")  # all of them write <think>…</think>

# In a template's source: its parser. The first that is found counts.
_TOOL_SIGNS = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|python_start|>": "llama4_pythonic",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
}


def make_output_parser(
    tool_parser: str | None, reasoning_parser: str | None, *, prompt: str = ""
) -> OutputParser:
    """A parser for one completion.

    Args:
      tool_parser: None when the request has no tools: then nothing is taken for a call.
      prompt: the end of the rendered prompt; where it opens <think> without closing it, the text begins inside.
    """
    reasoning = None
    if reasoning_parser is not None:
        reasoning = Reasoning(inside=prompt.rfind("<think>") > prompt.rfind("</think>"))
    return OutputParser(reasoning, TOOL_PARSERS[tool_parser]() if tool_parser else NoTools())


def guess_tool_parser(template: str) -> str | None:
    return next((parser for sign, parser in _TOOL_SIGNS.items() if sign in template), None)


def guess_reasoning_parser(template: str) -> str | None:
    return "qwen3" if "</think>" in template else None

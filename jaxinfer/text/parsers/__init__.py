"""Parsers of what a model writes: reasoning, tool calls, content. Any way of cutting the text gives the same result."""

from jaxinfer.text.parsers.base import Delta, ToolParser
from jaxinfer.text.parsers.output import REASONING_END, OutputParser
from jaxinfer.text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    guess_reasoning_parser,
    guess_tool_parser,
    make_output_parser,
)

__all__ = [
    "REASONING_END",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Delta",
    "OutputParser",
    "ToolParser",
    "guess_reasoning_parser",
    "guess_tool_parser",
    "make_output_parser",
]

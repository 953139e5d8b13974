"""Llama 4's tool calls: a Python list of calls, `[f(a="b"), g(n=1)]`, or JSON; bare, after prose, or between python markers."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from jaxinfer.text.parsers.base import Delta, ToolParser, call, content
from jaxinfer.text.parsers.json_calls import calls_in

_START, _END = "<|python_start|>", "<|python_end|>"
_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(|\{\s*\"|\[\s*\{\s*\"|" + re.escape(_START))
_MAYBE = re.compile(
    r"(?:\[\s*(?:[A-Za-z_][\w.]*\s*|\{\s*)?|\{\s*)$"
)  # at the end of the text: may become the start of calls
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class PythonicCalls(ToolParser):
    """From the first thing that looks like calls the text is kept until its end, then parsed; if it is none, it was content."""

    needs_special_tokens = True

    def __init__(self) -> None:
        self._held = ""
        self._found = False

    def push(self, text: str) -> list[Delta]:
        self._held += text
        if self._found:
            return []
        match = _CALLS.search(self._held)
        if match is not None:
            self._found = True
            before, self._held = self._held[: match.start()], self._held[match.start() :]
            return content(before)
        maybe = _MAYBE.search(self._held)
        keep = len(self._held) if maybe is None else maybe.start()
        for n in range(min(len(_START) - 1, len(self._held)), 0, -1):
            if self._held.endswith(_START[:n]):
                keep = min(keep, len(self._held) - n)
                break
        before, self._held = self._held[:keep], self._held[keep:]
        return content(before)

    def finish(self) -> list[Delta]:
        text, self._held = self._held, ""
        if not self._found:
            return content(text)
        inside = text.removeprefix(_START)
        inside, _, after = inside.partition(_END)
        source, rest = _split(inside.strip())
        calls = calls_in(source) or _python_calls(source)
        if calls is None:
            return content(text.replace(_START, "").replace(_END, ""))
        return calls + content((rest + after).replace(_START, "").replace(_END, "").strip())


def _split(text: str) -> tuple[str, str]:
    """The bracketed beginning of a text, and what follows it."""
    depth, quote, i = 0, "", 0
    while i < len(text):
        c = text[i]
        if quote:
            if c == "\\":
                i += 1
            elif c == quote:
                quote = ""
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth <= 0:
                rest = text[i + 1 :]
                if not re.match(r"\s*[;,]?\s*[\[{]", rest):  # more calls, as JSON objects in a row
                    return text[: i + 1], rest
        i += 1
    return text, ""


def _python_calls(text: str) -> list[Delta] | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            return None
        try:
            name = _name(node.func)
            arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
            if None in arguments:
                return None
            calls.append(call(name, json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, TypeError, RecursionError):
            return None
    return calls or None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")


def _value(node: ast.expr) -> Any:
    """A literal; JSON's words for constants count too. Nothing is evaluated."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise ValueError("not a literal")
        return {
            str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value is Ellipsis:
        raise ValueError("not a JSON value")
    return value

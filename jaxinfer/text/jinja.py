"""A Jinja environment for chat templates: what Hugging Face's templates expect, and no more power than that.

Templates come with checkpoints, so they are other people's programs. The sandbox keeps them from our
objects; the budget here keeps them from our time and memory.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=float("inf"))


_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})")


class TooExpensive(SecurityError):
    """A template went over its budget of time or memory."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' settings, filters and functions, and a budget on each render.

    Args:
      max_chars: longest string or list an operator may make.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_chars: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
        )
        self.max_chars = max_chars
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def budget(self, seconds: float) -> Iterator[None]:
        """Within it, templates raise TooExpensive once this much time has passed."""
        token = _deadline.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            _deadline.reset(token)

    # Every loop worth fearing reads an attribute, calls something or computes: the clock is looked at there.
    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_time()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        if any(isinstance(width, int) and width > self.max_chars for width in (*args, *kwargs.values())):
            raise TooExpensive("the template asks for a string that is too long")
        return self._check_size(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self._check_length(len(value) * times)
        elif operator == "**" and not (_small(left) and _small(right)):
            raise TooExpensive("the template raises a large number to a power")
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TooExpensive("the template formats a string with too large a width")
        return self._check_size(super().call_binop(context, operator, left, right))

    def _check_size(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self._check_length(len(value))
        return value

    def _check_length(self, length: int) -> None:
        if length > self.max_chars:
            raise TooExpensive("the template makes a string or list that is too long")


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TooExpensive("the template takes too long")


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1000


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: text stays readable, nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

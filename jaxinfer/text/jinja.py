"""A Jinja environment for chat templates: what Hugging Face's templates expect, and no more power than that.

Templates come with checkpoints, so they are other people's programs. The sandbox keeps them from our
objects; the budget here keeps them from our time and memory.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=float("inf"))


_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})|\{[^{}]*:[^{}]*\d{6}")


_LARGE = 2**64  # squared a few dozen times an integer fills any memory


class TooExpensive(SecurityError):
    """A template went over its budget of time or memory."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedConcat(CodeGenerator):
    """`a ~ b` goes through the environment, which looks at the sizes first."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_bounded((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' settings, filters and functions, and a budget on each render.

    Args:
      max_chars: longest string or list an operator, a filter or a method may make.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _BoundedConcat

    def __init__(self, max_chars: int):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
            finalize=self._bounded,
        )
        self.max_chars = max_chars
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded_filter(name, f) for name, f in self.filters.items()}
        del self.globals["lipsum"]  # takes as long as it is told to
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
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(subject, str):
            if obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # looked at, then used
            self._check_growth(obj.__name__, subject, (*args, *kwargs.values()))
        self._check_widths((*args, *kwargs.values()))
        return self._check_size(super().call(context, obj, *args, **kwargs))

    def concat_bounded(self, parts: tuple[Any, ...]) -> str:
        return "".join(map(str, self._bounded(parts)))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # before it stands the environment or the context

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_time()
            if name == "join":
                args = (*args[:first], list(args[first]), *args[first + 1 :])
            rest = (*args[first + 1 :], *kwargs.values())
            self._check_widths(rest)
            self._check_growth(name, args[first], rest)
            return self._check_size(function(*args, **kwargs))

        return bounded

    def _check_widths(self, values: Iterable[Any]) -> None:
        if any(isinstance(width, int) and width > self.max_chars for width in values):
            raise TooExpensive("the template asks for a string that is too long")

    def _check_growth(self, name: str, subject: Any, rest: tuple[Any, ...]) -> None:
        """Looks at what filters and methods of strings would make of a little, before they make it."""
        widest = max((v if isinstance(v, int) else self._measure(v) for v in rest), default=1)
        if name == "replace" and len(rest) > 1 and isinstance(subject, str) and isinstance(rest[0], str):
            self._check_length(subject.count(rest[0]) * self._measure(rest[1]))
        elif name == "join":
            parts, between = subject, rest[0] if rest else ""
            if isinstance(subject, str):  # the method, which belongs to what goes between
                parts, between = between, subject
            self._check_length(len(parts) * self._measure(between) + self._measure(parts))
        elif name == "indent":
            self._check_length((str(self._bounded(subject)).count("\n") + 1) * widest)
        elif name in ("wordwrap", "tojson", "expandtabs", "translate"):
            self._check_length(self._measure(subject) * max(1, widest))
        elif name in ("string", "pprint", "xmlattr", "urlencode"):
            self._bounded(subject)
        elif name == "format" and isinstance(subject, str) and _WIDE_FORMAT.search(subject):
            raise TooExpensive("the template formats a string with too large a width")

    def _bounded(self, value: Any) -> Any:
        """The value, if it is not too long to be written out."""
        self._check_length(self._measure(value))
        return value

    def _measure(self, value: Any) -> int:
        """Characters and members in it, counted as often as they would be written; no further than the limit."""
        total, rest = 0, [value]
        for step in itertools.count():
            if not rest or total > self.max_chars:
                break
            if not step % 1024:
                _check_time()
            one = rest.pop()
            if isinstance(one, str):
                total += len(one)
            elif isinstance(one, list | tuple | Mapping):
                total += len(one)
                rest += one
                if isinstance(one, Mapping):
                    rest += one.values()
        return total

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self._check_length(len(value) * times)
                elif isinstance(value, int) and abs(value) > _LARGE:
                    raise TooExpensive("the template multiplies large numbers")
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

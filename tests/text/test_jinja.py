from __future__ import annotations

import time

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.text.chat import ChatTemplate

USER = {"role": "user", "content": "hi", "value": {"b": "<é>", "a": 1}}


def render(source: str, **limits) -> str:
    return ChatTemplate(source, **limits).render([USER])


def test_json_is_readable_and_not_escaped_for_html():
    assert render("{{ messages[0]['value'] | tojson }}") == '{"b": "<é>", "a": 1}'
    assert (
        render("{{ messages[0]['value'] | tojson(indent=1, sort_keys=true) }}")
        == '{\n "a": 1,\n "b": "<é>"\n}'
    )


def test_blocks_leave_no_blank_lines():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_generation_blocks_and_the_date():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y is defined }}") == "xFalse"
    assert render("{{ strftime_now('%Y') }}") in {
        str(time.localtime().tm_year),
        str(time.localtime().tm_year - 1),
    }
    assert (
        render("{% macro f(obj, context) %}{{ obj ~ context }}{% endmacro %}{{ f(obj=1, context=2) }}")
        == "12"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
    ],
)
def test_templates_cannot_reach_out_of_the_sandbox(source: str):
    with pytest.raises(RequestError):
        render(source)


def test_filters_and_methods_do_what_they_do():
    source = (
        "{{ ['a', 1, none] | join('-') }} {{ ', '.join(['a', 'b']) }} {{ 'aXbX' | replace('X', 'yz') }} {{ 'aXb'.replace('X', '') }} "
        "{{ 'a\nb' | indent(2) }} {{ 'a' ~ 1 ~ none ~ 'é' }} {{ '{} {:>3}'.format(1, 'b') }} {{ [{'k': 'v'}] | tojson(indent=2) }} "
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }} {{ 'ab' | upper | list | length }} "
        "{{ 'x' | center(3) }}| {{ [3, 1] | sort | first }} {{ {'b': 1} | items | list }} {{ '%s-%d' | format('a', 2) }}"
    )
    assert render(source) == (
        'a-1-None a, b ayzbyz ab a\n  b a1Noneé 1   b [\n  {\n    "k": "v"\n  }\n] hi 2 '
        " x | 1 [('b', 1)] a-2"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9999 ** 9999 ** 9 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | string }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s=9999) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x\ny' | indent(10**9) }}",
        "{{ ('x\n' * 90000) | indent(90000) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ ('x' * 900000) | replace('x', 'y' * 900000) }}",
        "{{ ('x' * 900000).replace('x', 'y' * 900000) }}",
        "{{ ['x' * 900000] * 10000 | int }}",
        "{{ (['x' * 900000] * 10000) | join }}",
        "{{ ('x' * 900000).join(['a'] * 10000) }}",
        "{{ range(9999) | map('string') | join('x' * 900000) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '\t\t\t'.expandtabs(900000) }}",
        "{{ ('a' * 9000).translate({97: 'x' * 9000}) }}",
        "{{ lipsum(10**6) }}",
    ],
)
def test_templates_cannot_take_much_memory(source: str):
    start = time.monotonic()
    with pytest.raises(RequestError):
        render(source, max_chars=1_000_000)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = messages[0].content %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_templates_cannot_take_much_time(source: str):
    start = time.monotonic()
    with pytest.raises(RequestError, match="takes too long"):
        render(source, max_seconds=0.1)
    assert time.monotonic() - start < 2


def test_a_long_prompt_within_the_limit_is_fine():
    messages = [{"role": "user", "content": "x" * 1000}] * 2000
    out = ChatTemplate("{% for m in messages %}{{ m.content + ';' }}{% endfor %}").render(messages)
    assert len(out) == 2000 * 1001
    with pytest.raises(RequestError, match="more than 100000 characters"):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", max_chars=100_000).render(messages)

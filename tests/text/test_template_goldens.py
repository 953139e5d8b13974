"""Chat templates of the families render as transformers renders them, byte for byte (tests/text/templates/README.md)."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.text import jinja
from jaxinfer.text.chat import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
LISTED = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
GOLDENS = json.loads((FOLDER / "goldens.json").read_text(encoding="utf-8"))
TRIM = ("gemma3_style", "llama3_style")
CASES: dict[str, dict[str, Any]] = LISTED["cases"]


class _Today(datetime.datetime):
    """The day that the goldens are of."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 12, 1, 9, 30, tzinfo=tz)


@pytest.fixture(scope="module", params=sorted(GOLDENS))
def named(request: pytest.FixtureRequest) -> tuple[str, ChatTemplate]:
    source = (FOLDER / f"{request.param}.jinja").read_text(encoding="utf-8")
    return request.param, ChatTemplate(source, special_tokens=LISTED["templates"][request.param])


def render(template: ChatTemplate, case: dict[str, Any], messages: Any) -> str:
    options = dict(case.get("options", {}))
    chosen = {
        name: options.pop(name)
        for name in ("add_generation_prompt", "continue_final_message")
        if name in options
    }
    return template.render(messages, tools=case.get("tools"), template_kwargs=options, **chosen)


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI's clients send calls."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copied


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_transformers(
    named: tuple[str, ChatTemplate], name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jinja.datetime, "datetime", _Today)
    family, template = named
    case, golden = CASES[name], GOLDENS[family][name]
    # What the model is to go on with is kept whole, also where the template trims, and transformers with it.
    kept = " " if name == "continued" and family in TRIM else ""
    for messages in (case["messages"], with_text_arguments(case["messages"])):
        if "error" in golden:
            with pytest.raises(RequestError) as caught:
                render(template, case, messages)
            assert caught.value.param == "messages"
            assert golden["error"] in str(caught.value)
        else:
            assert render(template, case, messages) == golden["text"] + kept


def test_every_template_and_every_case_has_a_golden():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(GOLDENS) == set(LISTED["templates"])
    assert all(list(golden) == list(CASES) for golden in GOLDENS.values())

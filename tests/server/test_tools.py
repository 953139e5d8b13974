"""Tools, reasoning and forms through the whole server. B-numbers: public bug reports of other servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import TOKENIZER, ScriptedEngine, says, serving
from test_requests import CHAT, call, refused
from test_streaming import chunks
from tiny_checkpoint import write_checkpoint

from jaxinfer import LLM
from jaxinfer.config.server import ServerConfig
from jaxinfer.serve import served_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def both(server, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and finish reason of a chat, which must be the same streamed and not."""
    status, answer, _ = call(server, "/v1/chat/completions", {**CHAT, **body})
    assert status == 200, answer
    [choice] = answer["choices"]
    parts = chunks(server, **{"max_tokens": None, **CHAT, **body})
    streamed: dict[str, Any] = {"role": "", "content": "", "reasoning": "", "tool_calls": []}
    reasons = []
    for part in parts:
        [piece] = part["choices"]
        reasons.append(piece["finish_reason"])
        for key, value in piece["delta"].items():
            streamed[key] += value
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == choice["finish_reason"]
    message = choice["message"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    calls = [{k: v for k, v in c.items() if k not in ("index", "id")} for c in streamed["tool_calls"]]
    assert calls == [{k: v for k, v in c.items() if k != "id"} for c in message.get("tool_calls", [])]
    assert [c["index"] for c in streamed["tool_calls"]] == list(range(len(calls)))
    return message, choice["finish_reason"]


def test_b34_b35_finish_reasons(serve):
    server = serve(ScriptedEngine(says("I look. " + CALL)), tool_call_parser="hermes")
    message, reason = both(server, tools=[WEATHER])
    assert reason == "tool_calls"
    assert message["content"] == "I look."
    [made] = message["tool_calls"]
    assert made["type"] == "function"
    assert made["id"]
    assert made["function"]["name"] == "weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Rome"}
    # The model did not call: no empty list, and an ordinary end.
    message, reason = both(
        serve(ScriptedEngine(says("No need.")), tool_call_parser="hermes"), tools=[WEATHER]
    )
    assert reason == "stop"
    assert "tool_calls" not in message
    # Without tools, or with tool_choice none, the text is the text.
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message, reason = both(server, **extra)
        assert message["content"] == "I look. " + CALL
        assert reason == "stop"


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ('{"city": "\\ud83d"}', None),  # half a character: no UTF-8 text can hold it
        ('{"city": NaN}', '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>'),
    ],
)
def test_arguments_are_always_json_that_a_client_can_read(serve, arguments: str, content: str | None):
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    message, reason = both(serve(ScriptedEngine(says(text)), tool_call_parser="hermes"), tools=[WEATHER])
    assert message["content"] == content
    assert reason == ("stop" if content else "tool_calls")
    if content is None:
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_forced_call_is_bound_by_grammar_and_named(serve):
    engine = ScriptedEngine(says('[{"name": "weather", "arguments": {"city": "Oslo"}}]'))
    server = serve(engine)
    message, reason = both(server, tools=[WEATHER], tool_choice="required")
    assert reason == "tool_calls"
    assert message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    constraint = engine.seen[0][1].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    named = {"type": "function", "function": {"name": "weather"}}
    message, reason = both(server, tools=[WEATHER], tool_choice=named)
    assert (reason, len(message["tool_calls"])) == ("stop", 1)
    constraint = engine.seen[-1][1].constraint
    assert constraint is not None
    assert '"maxItems": 1' in constraint.value


def test_wrong_tools_are_refused(serve):
    server = serve()
    wrong = {"type": "function", "function": {"name": "nowhere"}}
    assert refused(server, "/v1/chat/completions", {**CHAT, "tools": []})["param"] == "tools"
    body = {**CHAT, "tools": [WEATHER], "tool_choice": wrong}
    assert refused(server, "/v1/chat/completions", body)["param"] == "tool_choice"
    # This model's template knows no tools.
    assert (
        "knows no tools" in refused(server, "/v1/chat/completions", {**CHAT, "tools": [WEATHER]})["message"]
    )
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert refused(server, "/v1/chat/completions", body)["param"] == "tool_choice"


def test_b25_a_history_with_calls_round_trips(serve):
    engine = ScriptedEngine(says("ok"))
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    **{k: WEATHER[k] for k in ("type",)},
                    "function": {"name": "weather", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    status, *_ = call(serve(engine), "/v1/chat/completions", {"messages": history})
    assert status == 200
    assert "None" not in TOKENIZER.decode(engine.seen[0][0], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "tokens"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "\nhm\n", "Yes.", len("<think>\nhm\n")),  # a token a byte
        ("<think>né never ends", "né never ends", None, len("<think>né never ends".encode())),
        ("Yes.", None, "Yes.", 0),
    ],
)
def test_b38_reasoning(serve, text: str, reasoning: str | None, content: str | None, tokens: int):
    server = serve(ScriptedEngine(says(text)), reasoning_parser="qwen3")
    message, _ = both(server)
    assert message.get("reasoning") == reasoning
    assert message["content"] == content
    _, whole, _ = call(server, "/v1/chat/completions", CHAT)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, streamed, _ = call(server, "/v1/chat/completions", {**CHAT, **options})
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    assert f'"reasoning_tokens":{tokens}}}' in streamed


def test_forms_are_enforced_by_the_real_engine(tmp_path: Path):
    llm = LLM(write_checkpoint(tmp_path), warm_up=False, max_num_seqs=4, max_model_len=512)
    with serving(llm.engine, served_model(llm, ServerConfig(served_model_name="tiny"))) as server:
        schema = {**WEATHER["function"]["parameters"], "x-guidance": {"whitespace_flexible": False}}
        formats = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
        status, answer, _ = call(
            server, "/v1/chat/completions", {**CHAT, "response_format": formats, "seed": 1}
        )
        assert status == 200
        assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Oslo", "Rome")
        body = {"prompt": "x", "structured_outputs": {"regex": "[ab]{5}"}, "seed": 2}
        assert len(call(server, "/v1/completions", body)[1]["choices"][0]["text"]) == 5
        body = {"prompt": "x", "structured_outputs": {"regex": "(("}}
        assert refused(server, "/v1/completions", body)["code"] == "invalid_grammar"
        status, answer, _ = call(
            server,
            "/v1/chat/completions",
            {**CHAT, "tools": [WEATHER], "tool_choice": "required", "seed": 3, "max_tokens": 200},
        )
        [choice] = answer["choices"]
        if choice["finish_reason"] == "tool_calls":
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["city"] in (
                "Oslo",
                "Rome",
            )
        assert server.wait_idle()

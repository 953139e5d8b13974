"""The Responses API through the real client."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
import pytest
from scripted import NAN, TOKENIZER, ScriptedEngine, says
from test_requests import call, refused

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_a_response(serve, client_of):
    engine = ScriptedEngine(says("Hello!"))
    answer = client_of(serve(engine)).responses.create(
        model="scripted", input="hi", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}
    )
    assert answer.output_text == "Hello!"
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + 7
    assert answer.id.startswith("resp_")
    assert answer.metadata == {"a": "b"}
    shown = TOKENIZER.decode(engine.seen[0][0], skip_special_tokens=False)
    assert (
        shown
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_cut_off_is_incomplete(serve, client_of):
    answer = client_of(serve(ScriptedEngine(says("Hello!")))).responses.create(
        model="scripted", input="hi", max_output_tokens=3
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Hel"


def test_the_events_of_a_stream(serve, client_of):
    text = f"<think>hm</think>Well. {CALL}"
    server = serve(ScriptedEngine(says(text)), tool_call_parser="hermes", reasoning_parser="qwen3")
    client = client_of(server)
    events = list(client.responses.create(model="scripted", input="hi", tools=[TOOL], stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    added = [e.item.type for e in events if e.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Well."
    [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"city": "Rome"}
    final = events[-1].response
    assert final.usage.output_tokens_details.reasoning_tokens == len("<think>hm")  # a token a byte
    assert [item.type for item in final.output] == added
    whole = client.responses.create(model="scripted", input="hi", tools=[TOOL])

    def strip(items):
        return [{k: v for k, v in i.model_dump().items() if k not in ("id", "call_id")} for i in items]

    assert strip(whole.output) == strip(final.output)
    for event in events:  # every item is complete when it is said to be
        if event.type == "response.output_item.done":
            assert event.item.status == "completed"


def test_a_history_of_calls_and_answers(serve):
    engine = ScriptedEngine(says("ok"))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is sunny."}],
        },
        {"role": "user", "content": "thanks"},
    ]
    status, *_ = call(serve(engine), "/v1/responses", {"input": items})
    assert status == 200
    shown = TOKENIZER.decode(engine.seen[0][0], skip_special_tokens=False)
    assert "<|im_start|>tool\nsunny<|im_end|>" in shown
    assert "It is sunny." in shown


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
    ],
)
def test_what_is_refused(serve, change: dict[str, Any], param: str):
    assert refused(serve(), "/v1/responses", {"input": "hi", **change})["param"] == param


def test_forms_reach_the_engine(serve):
    engine = ScriptedEngine(says("{}"))
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert call(serve(engine), "/v1/responses", {"input": "hi", "text": {"format": format_}})[0] == 200
    constraint = engine.seen[0][1].constraint
    assert constraint is not None
    assert json.loads(constraint.value) == {"type": "object"}


def test_a_stream_that_fails_says_so(serve, client_of):
    server = serve(ScriptedEngine(lambda *_: [*b"ab", NAN]))
    events = list(client_of(server).responses.create(model="scripted", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert "NaN" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError):
        client_of(server).responses.create(model="scripted", input="hi")
    request = urllib.request.Request(
        f"{server.url}/v1/responses",
        json.dumps({"input": "x", "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert b"[DONE]" not in answer.read()

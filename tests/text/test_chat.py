from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import CheckpointError, RequestError
from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.text.tokenizer import Tokenizer

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "smollm2_135m.json").read_text(encoding="utf-8"))
CHATS = [case for case in ORACLE["cases"] if "messages" in case]

PLAIN = """{% for message in messages %}[{{ message.role }}]{{ message.content }};{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
CALLS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}\
<{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"""
USER = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.fixture(scope="module")
def template(smollm2: Tokenizer) -> ChatTemplate:
    found = ChatTemplate.from_tokenizer(smollm2)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("safe", [False, True])
def test_prompts_are_those_of_the_reference(
    smollm2: Tokenizer, template: ChatTemplate, case: dict, safe: bool
):
    assert template.render(case["messages"]) == case["rendered"]
    assert encode_chat(smollm2, template, case["messages"], safe=safe) == case["token_ids"]


def test_a_tokenizer_without_template(smollm2_metadata: dict):
    metadata = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.chat_template"}
    assert ChatTemplate.from_tokenizer(Tokenizer.from_gguf(metadata)) is None


def test_null_content_is_empty_and_tool_calls_stay():
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]}]
    assert ChatTemplate(CALLS).render(messages) == '[user]hi;[assistant]<f>{"x": 1};'
    assert messages[1]["content"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": "é"}', '<{"x": "é"}>'),
        ({"x": "é"}, '<{"x": "é"}>'),
        ("", "<{}>"),
        ("{broken", "<{broken>"),
        ("[1]", "<[1]>"),
        (None, "<null>"),
    ],
)
def test_arguments_of_tool_calls_for_a_template_that_joins_text(arguments: Any, expected: str):
    joining = """{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}\
{% endfor %}{% endfor %}"""
    assert ChatTemplate(joining).render([{"role": "assistant", "tool_calls": [call(arguments)]}]) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ""),
        ([], ""),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}, {"type": "text", "text": ""}],
            "ab\n",
        ),
        ([{"text": "a"}, "b"], "ab"),
    ],
)
def test_content_may_be_empty_or_parts(content: Any, expected: str):
    assert (
        ChatTemplate(PLAIN).render([{"role": "user", "content": content}]) == f"[user]{expected};[assistant]"
    )


def test_developer_is_system_unless_the_template_knows_it():
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(PLAIN).render(messages).startswith("[system]")
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert ChatTemplate(knowing).render(messages) == "yes"


def test_roles_of_the_templates_own():
    messages = [{"role": "observation", "content": "x"}]
    with pytest.raises(RequestError, match="'observation' is unknown") as caught:
        ChatTemplate(PLAIN).render(messages)
    assert caught.value.param == "messages"
    assert ChatTemplate("{{ messages[0].role == 'observation' }}").render(messages) == "True"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {"role": "user"},
        [1],
        [{"content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": [{}]}],
    ],
)
@pytest.mark.parametrize("safe", [False, True])
def test_messages_of_the_wrong_shape_are_the_requests_fault(
    smollm2: Tokenizer, template: ChatTemplate, messages: Any, safe: bool
):
    with pytest.raises(RequestError) as caught:
        encode_chat(smollm2, template, messages, safe=safe)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", [5, "x", {"type": "function"}])
def test_tools_and_documents_must_be_lists(name: str, value: Any):
    with pytest.raises(RequestError, match="must be a list") as caught:
        ChatTemplate(PLAIN).render([USER], **{name: value})
    assert caught.value.param == name


def test_a_template_that_refuses_is_quoted():
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(RequestError, match=r"^System role not supported$") as caught:
        ChatTemplate(refusing).render([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.no.such }}",
        "{{ messages + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_is_a_request_error(source: str):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"


def test_a_template_that_is_not_jinja_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="chat template 'default' is not valid Jinja"):
        ChatTemplate("{% for %}")


def test_what_the_template_is_given():
    source = "{{ bos_token }}|{{ tools | tojson }}|{{ documents[0].title }}|{{ thinking }}|{{ eos_token is defined }}"
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    out = template.render(
        [USER], tools=[{"name": "<f> é"}], documents=[{"title": "D"}], template_kwargs={"thinking": False}
    )
    assert out == '<s>|[{"name": "<f> é"}]|D|False|False'
    assert ChatTemplate("{{ tools is none }}").render([USER], tools=[]) == "True"


def test_tool_use_template_serves_requests_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"name": "f"}]) == "with tools"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception"]
)
def test_template_variables_cannot_be_shadowed(name: str):
    template = ChatTemplate(PLAIN, special_tokens={"bos_token": "<s>"})
    with pytest.raises(RequestError, match=name) as caught:
        template.render([USER], template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "prefill", ["The answer", "trailing space ", " \n", "", "with ; and [assistant] in it"]
)
def test_prompt_ends_with_the_prefill(prefill: str):
    messages = [USER, {"role": "assistant", "content": prefill}]
    assert (
        ChatTemplate(PLAIN).render(messages, continue_final_message=True) == f"[user]hi;[assistant]{prefill}"
    )


def test_prefill_survives_a_template_that_trims(smollm2: Tokenizer, template: ChatTemplate):
    trimming = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "so "}]
    assert (
        ChatTemplate(trimming).render(messages, continue_final_message=True) == "[user]hi</s>[assistant]so "
    )
    ids = encode_chat(smollm2, template, messages, continue_final_message=True)
    assert ids[-1] not in smollm2.eos_token_ids
    assert smollm2.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nso ")


def test_prefill_needs_an_assistant_message_that_is_shown():
    with pytest.raises(RequestError, match="needs a last message from the assistant, not 'user'"):
        ChatTemplate(PLAIN).render([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}").render(
            [USER, {"role": "assistant", "content": "x"}], continue_final_message=True
        )


def test_bos_comes_once(smollm2: Tokenizer):
    twice = ChatTemplate("{{ bos_token }}{{ bos_token }}hi", special_tokens=smollm2.special_tokens)
    assert encode_chat(smollm2, twice, [USER]) == [1, *smollm2.encode("hi")]


def test_rendering_leaves_the_request_alone(template: ChatTemplate):
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [call("{}")]},
    ]
    before = json.dumps(messages)
    template.render(messages, continue_final_message=True)
    assert json.dumps(messages) == before

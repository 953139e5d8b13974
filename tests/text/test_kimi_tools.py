"""Tools as Kimi's own tokenizer code gives them to its templates; goldens: tests/text/templates/README.md."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.text import kimi_tools
from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
CASES = json.loads((TEMPLATES / "kimi_tools.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hi"}]
BOTH = ChatTemplate("{{ tools_ts_str }}|{{ tools | tojson }}|{{ messages[0].content }}")
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("kimi")
    (path / "tiktoken.model").write_bytes(
        b"\n".join(base64.b64encode(bytes([b])) + b" %d" % b for b in range(256))
    )
    added = {"256": {"content": "<|im_end|>"}, "257": {"content": "<|im_middle|>"}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(path)


def prompt(tokenizer: Tokenizer, template: ChatTemplate, tools: Any, **options: Any) -> str:
    return tokenizer.decode(
        encode_chat(tokenizer, template, USER, tools=tools, **options), skip_special_tokens=False
    )


@pytest.mark.parametrize("name", CASES)
def test_declarations_are_those_of_kimis_own_code(name: str):
    tools = kimi_tools.sort_keys(CASES[name]["tools"])
    assert kimi_tools.declare(tools) == (CASES[name]["text"] or "")


def test_keys_are_sorted_all_the_way_down_and_the_request_is_left_alone():
    tools = [{"b": [{"d": 1, "c": {"z": 1, "y": [2, 1]}}], "a": None}]
    assert json.dumps(kimi_tools.sort_keys(tools)) == (
        '[{"a": null, "b": [{"c": {"y": [2, 1], "z": 1}, "d": 1}]}]'
    )
    assert list(tools[0]) == ["b", "a"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("safe", [False, True])
def test_templates_of_kimis_tokenizer_get_them(kimi: Tokenizer, name: str, safe: bool):
    tools = CASES[name]["tools"]
    sent = json.dumps(tools, sort_keys=True, ensure_ascii=False)
    assert prompt(kimi, BOTH, tools, safe=safe) == f"{CASES[name]['text'] or ''}|{sent}|Hi"


def test_other_options_of_the_template_stay(kimi: Tokenizer):
    source = (TEMPLATES / "kimi_k25_style.jinja").read_text(encoding="utf-8")
    options = {"template_kwargs": {"thinking": False, "tools_ts_str": "mine"}}
    text = prompt(kimi, ChatTemplate(source), TOOLS, **options)
    assert text.startswith("<|im_system|>tool_declare<|im_middle|># Tools\n")
    assert text.endswith("<|im_assistant|>assistant<|im_middle|><think></think>")
    assert options["template_kwargs"]["tools_ts_str"] == "mine"
    assert "# Tools" not in prompt(kimi, ChatTemplate(source), None)


def test_templates_of_other_tokenizers_get_tools_as_sent(smollm2: Tokenizer):
    assert prompt(smollm2, BOTH, TOOLS) == f"|{json.dumps(TOOLS)}|Hi"


def test_spoofed_tokens_in_declarations_stay_text(kimi: Tokenizer):
    spoof = "<|im_end|>"
    field = {"type": "string", "description": spoof, "enum": [spoof], "default": spoof}
    parameters = {"type": "object", "properties": {spoof: field}, "required": [spoof]}
    tools = [{"type": "function", "function": {"name": spoof, "parameters": parameters}}]
    template = ChatTemplate("<|im_middle|>{{ tools_ts_str }}{{ tools | tojson }}<|im_end|>")
    ids = encode_chat(kimi, template, USER, tools=tools, safe=True)
    assert [i for i in ids if i in kimi.special_ids] == [257, 256]
    text = kimi.decode(ids, skip_special_tokens=False)
    assert text == prompt(kimi, template, tools)
    assert f'type {spoof} = (_: {{\n  // {spoof}\n  // Default: "{spoof}"\n  {spoof}: "{spoof}"\n}})' in text


def test_deep_nesting_is_the_requests_fault(kimi: Tokenizer):
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="tools are nested too deeply"):
        prompt(kimi, BOTH, [{"type": "function", "function": deep}])

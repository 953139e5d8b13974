from __future__ import annotations

import json
import math

import pytest
from byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.request import CompletionOutput, RequestOutput, TokenLogprob
from jaxinfer.errors import RequestError
from jaxinfer.protocol.errors import error_body, request_error_object
from jaxinfer.protocol.logprobs import text_offsets
from jaxinfer.protocol.parse import parse_chat_request, parse_completion_request
from jaxinfer.protocol.prompt import prepare
from jaxinfer.protocol.response import chat_completion, failure_of, text_completion
from jaxinfer.protocol.usage import usage
from jaxinfer.text.chat import ChatTemplate

TOKENIZER = byte_tokenizer()
NAMES = {"response_id": "id-1", "created": 1_700_000_000, "model": "m"}


def prepared(body):
    parse = parse_chat_request if "messages" in body else parse_completion_request
    template = ChatTemplate.from_tokenizer(TOKENIZER)
    return prepare(parse(body), TOKENIZER, template, max_model_len=1000, vocab_size=VOCAB_SIZE)


def chat(**fields):
    return prepared({"messages": [{"role": "user", "content": "q"}], **fields})


def logprobs_of(ids, top=0):
    return [TokenLogprob(i, -0.5, [(i, -0.5), (65, -1.5), (66, -math.inf)][:top]) for i in ids]


def finished(prompt_ids, texts, *, top=None, prompt_top=None, cached=0):
    outputs = []
    for index, text in enumerate(texts):
        ids = list(text.encode())
        logprobs = None if top is None else logprobs_of(ids, top)
        outputs.append(CompletionOutput(index, text, ids, logprobs, "stop", None))
    prompt_logprobs = None if prompt_top is None else [None, *logprobs_of(prompt_ids[1:], prompt_top)]
    return RequestOutput(
        "r", prompt_ids, outputs, prompt_logprobs=prompt_logprobs, cached_tokens=cached, finished=True
    )


def test_chat_completion():
    request = chat(return_token_ids=True)
    body = chat_completion(request, finished([1, 2, 3], ["hé"], cached=2), TOKENIZER, **NAMES)
    assert body == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [104, 0xC3, 0xA9],
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "prompt_token_ids": [1, 2, 3],
    }


def test_chat_logprobs_have_text_bytes_and_alternatives():
    body = chat_completion(
        chat(logprobs=True, top_logprobs=3), finished([1], ["é"], top=3), TOKENIZER, **NAMES
    )
    first, second = body["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.5)
    assert second["bytes"] == [0xA9]
    assert first["top_logprobs"][1] == {"token": "A", "bytes": [65], "logprob": -1.5}
    assert first["top_logprobs"][2]["logprob"] == -9999.0
    json.dumps(body, allow_nan=False)


def test_chat_logprobs_without_alternatives():
    body = chat_completion(chat(logprobs=True), finished([1], ["a"], top=0), TOKENIZER, **NAMES)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs():
    request = prepared({"prompt": "q", "logprobs": 2})
    body = text_completion(request, [finished([113], ["aé!"], top=2)], TOKENIZER, **NAMES)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd", "!"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [{"a": -0.5, "A": -1.5}, *[{"\ufffd": -0.5, "A": -1.5}] * 2, {"!": -0.5, "A": -1.5}],
        "text_offset": [0, 1, 1, 2],
    }


def test_the_chosen_token_is_among_the_top_ones_even_when_it_is_not():
    request = prepared({"prompt": "q", "logprobs": 1})
    output = finished([113], ["z"])
    output.outputs[0].logprobs = [TokenLogprob(122, -7.0, [(65, -0.1)])]
    body = text_completion(request, [output], TOKENIZER, **NAMES)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -0.1, "z": -7.0}]


def test_offsets_of_tokens_that_a_stop_string_cut_away_stay_in_the_text():
    request = prepared({"prompt": "q", "logprobs": 0})
    output = finished([113], ["abcd"], top=0)
    output.outputs[0].text = "ab"
    body = text_completion(request, [output], TOKENIZER, **NAMES)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 2]


def test_echo_puts_the_prompt_before_text_and_logprobs():
    request = prepared({"prompt": "hi", "echo": True, "logprobs": 1})
    output = finished(list(b"hi"), ["yo"], top=1, prompt_top=1)
    choice = text_completion(request, [output], TOKENIZER, **NAMES)["choices"][0]
    assert choice["text"] == "hiyo"
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "y", "o"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {"y": -0.5}, {"o": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert "prompt_logprobs" not in choice


def test_echo_of_token_ids_is_their_text():
    request = prepared({"prompt": list(b"hi"), "echo": True})
    assert (
        text_completion(request, [finished(list(b"hi"), ["yo"])], TOKENIZER, **NAMES)["choices"][0]["text"]
        == "hiyo"
    )


def test_prompt_logprobs_are_shown_when_asked_for():
    request = prepared({"prompt": "hi", "prompt_logprobs": 1})
    output = finished(list(b"hi"), ["y"])
    output.prompt_logprobs = [None, TokenLogprob(105, -3.0, [(65, -0.1)])]
    shown = text_completion(request, [output], TOKENIZER, **NAMES)["choices"][0]["prompt_logprobs"]
    assert shown == [
        None,
        {
            "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
            "105": {"logprob": -3.0, "rank": None, "decoded_token": "i"},
        },
    ]


def test_without_a_tokenizer_ids_stand_for_text():
    request = prepare(
        parse_completion_request({"prompt": [1, 2], "logprobs": 1, "prompt_logprobs": 1}),
        None, None, max_model_len=1000, vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    output = finished([1, 2], ["ab"], top=1, prompt_top=1)
    output.outputs[0].text = ""
    choice = text_completion(request, [output], None, **NAMES)["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [97, 98], [1, 2])
    assert choice["logprobs"] == {
        "tokens": ["token_id:97", "token_id:98"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"token_id:97": -0.5}, {"token_id:98": -0.5}],
        "text_offset": [0, 0],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "token_id:2"}},
    ]


def test_choices_of_several_prompts_are_numbered_through():
    request = prepared({"prompt": ["a", "b"], "n": 2})
    outputs = [finished([97], ["x", "y"]), finished([98], ["z", "w"])]
    choices = text_completion(request, outputs, TOKENIZER, **NAMES)["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "x"), (1, "y"), (2, "z"), (3, "w")]


def test_a_prompt_counts_once_in_the_usage():
    counts = usage([finished([1, 2], ["x", "yy"], cached=1), finished([3], ["z"])])
    assert counts == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_stop_reason_is_reported():
    output = finished([1], ["x"])
    output.outputs[0].stop_reason = END
    assert (
        text_completion(prepared({"prompt": "q"}), [output], TOKENIZER, **NAMES)["choices"][0]["stop_reason"]
        == END
    )


@pytest.mark.parametrize(
    ("reason", "fails"), [("stop", False), ("length", False), ("error", True), ("abort", True)]
)
def test_what_counts_as_an_engine_failure(reason, fails):
    output = finished([1], ["x"])
    output.outputs[0].finish_reason = reason
    assert (failure_of(output) is not None) == fails
    output.error = "NaN logits"
    assert failure_of(output) == "NaN logits"


def test_error_body():
    error = RequestError("too hot", param="temperature", code="c")
    assert error_body(request_error_object(error)) == {
        "error": {"message": "too hot", "type": "invalid_request_error", "param": "temperature", "code": "c"}
    }


@given(st.text(max_size=20), st.integers(0, 5))
def test_each_character_begins_at_the_offset_of_its_first_byte(text, specials):
    ids = [END] * specials + list(text.encode())
    offsets = text_offsets(ids, TOKENIZER, True)[specials:]
    expected = [i for i, char in enumerate(text) for _ in char.encode()]
    assert offsets == expected

from __future__ import annotations

import pytest
from byte_tokenizer import byte_tokenizer

from jaxinfer.engine.request import SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.protocol.parse import parse_completion_request
from jaxinfer.protocol.text_params import tokenize_params

TOKENIZER = byte_tokenizer()


def test_each_word_at_the_start_of_a_text_and_after_a_space():
    params = tokenize_params(SamplingParams(bad_words=["no", " no", "é"], bad_words_ids=[[7]]), TOKENIZER)
    assert params.bad_words == ()
    assert params.bad_words_ids == ((7,), *(tuple(text.encode()) for text in ("no", " no", "é", " é")))
    assert tokenize_params(params, TOKENIZER) is params


def test_at_most_128_sequences():
    words = [f"w{i}" for i in range(65)]
    assert len(tokenize_params(SamplingParams(bad_words=words[1:]), TOKENIZER).bad_words_ids) == 128
    with pytest.raises(RequestError, match="at most 128 bad words after tokenisation, got 130") as caught:
        tokenize_params(SamplingParams(bad_words=words), TOKENIZER)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["w"] * 129, "at most 128 bad words, got 129"),
        (["w" * 257], "a bad word may have at most 256 characters, got 257"),
    ],
)
def test_words_are_bounded_before_they_are_tokenised(words, says):
    with pytest.raises(RequestError, match=says) as caught:
        tokenize_params(SamplingParams(bad_words=words), TOKENIZER)
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match="bad_words") as caught:
        parse_completion_request({"prompt": "a", "bad_words": words})


@pytest.mark.parametrize(("name", "instead"), [("bad_words", "bad_words_ids"), ("stop", "stop_token_ids")])
def test_text_needs_a_tokenizer(name, instead):
    params = SamplingParams().replace(**{name: ["x"]})
    with pytest.raises(RequestError, match=f"{name} needs a tokenizer.*give {instead}") as caught:
        tokenize_params(params, None)
    assert caught.value.param == name


def test_without_text_no_tokenizer_is_needed():
    params = SamplingParams(bad_words_ids=[[1, 2]], stop_token_ids=[3])
    assert tokenize_params(params, None) is params

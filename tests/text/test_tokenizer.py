from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "smollm2_135m.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_bytes(smollm2: Tokenizer) -> frozenset[int]:
    """The bytes this vocabulary can spell: it lacks some rare ones, and its makers' tokenizer drops them too."""
    pieces = {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}
    return frozenset(b for b in range(256) if bytes([b]) in pieces)


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["greedy_text"][:12].strip())
def test_ids_and_text_are_those_of_the_reference(smollm2: Tokenizer, case: dict):
    prompt = case["prompt"] if "prompt" in case else case["rendered"]
    assert smollm2.encode(prompt) == case["token_ids"]
    assert smollm2.decode(case["token_ids"], skip_special_tokens=False) == prompt
    assert smollm2.decode(case["greedy_ids"], skip_special_tokens=False) == case["greedy_text"]


@given(text=st.text())
@example("  two  spaces\n\n\tand tab ")
@example("<|im_end|> is spelled out")
@example("null \0 byte and \ue000 private use")
def test_encoding_and_decoding_gives_the_text_back(
    smollm2: Tokenizer, smollm2_bytes: frozenset[int], text: str
):
    assume(smollm2_bytes.issuperset(text.encode()))
    for parse_special in (True, False):
        ids = smollm2.encode(text, parse_special=parse_special)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@given(
    pieces=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", " a", "<"])
    )
)
def test_spelled_control_tokens_are_text_unless_parsed(smollm2: Tokenizer, pieces: list[str]):
    text = "".join(pieces)
    assert smollm2.special_ids.isdisjoint(smollm2.encode(text, parse_special=False))
    controls = sum(text.count(spelling) for spelling in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert sum(i in smollm2.special_ids for i in smollm2.encode(text)) == controls


def test_special_tokens_are_hidden_only_when_skipped(smollm2: Tokenizer):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert smollm2.token_text(2) == "<|im_end|>"


def test_ids_outside_the_vocabulary_are_empty_text(smollm2: Tokenizer):
    size = smollm2.vocab_size
    assert size == 49152
    assert [smollm2.token_bytes(i) for i in (-1, size, 2**40)] == [b"", b"", b""]
    ids = smollm2.encode("fine")
    assert smollm2.decode([-1, *ids, size, 2**40]) == "fine"


def test_bytes_that_are_no_character_decode_as_replacement(smollm2: Tokenizer):
    ids = smollm2.encode("漢")
    assert len(ids) > 1
    assert smollm2.decode(ids) == "漢"
    assert smollm2.decode(ids[:-1]) == "\ufffd"
    assert b"".join(smollm2.token_bytes(i) for i in ids) == "漢".encode()


def test_empty_text_has_no_ids_where_there_is_no_bos(smollm2: Tokenizer):
    assert smollm2.encode("") == []
    assert smollm2.decode([]) == ""


def test_half_a_surrogate_pair_is_the_requests_fault(smollm2: Tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.encode("a\ud800b")


def test_bos_comes_once_whatever_the_text_spells(smollm2_metadata: dict):
    tokenizer = Tokenizer.from_gguf({**smollm2_metadata, "tokenizer.ggml.add_bos_token": True})
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("") == [bos]
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert bos not in bare
    assert tokenizer.encode("hi") == [bos, *bare]
    assert tokenizer.encode("<|im_start|>hi") == [bos, *bare]
    ordinary = tokenizer.encode("<|im_start|>hi", parse_special=False)
    assert ordinary[0] == bos
    assert tokenizer.decode(ordinary[1:], skip_special_tokens=False) == "<|im_start|>hi"
    assert tokenizer.encode("<|im_start|><|im_start|>hi", add_special_tokens=False) == [bos, bos, *bare]


def test_eos_is_added_where_the_file_says_so(smollm2_metadata: dict):
    tokenizer = Tokenizer.from_gguf({**smollm2_metadata, "tokenizer.ggml.add_eos_token": True})
    assert tokenizer.encode("hi")[-1] == 2
    assert tokenizer.encode("hi", add_special_tokens=False)[-1] != 2

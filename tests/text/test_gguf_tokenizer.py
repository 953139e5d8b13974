from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import CheckpointError
from jaxinfer.text.parts import SPACE_MARK, spell_bytes
from jaxinfer.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, "he", "the", a few control tokens."""
    tokens = [spell_bytes(bytes([b])) for b in range(256)] + ["he", "the", "Ġthe"]
    types = [NORMAL] * len(tokens)
    for token, kind in [
        ("<|bos|>", CONTROL),
        ("<|im_end|>", CONTROL),
        ("<|eom_id|>", CONTROL),
        ("<tool>", USER_DEFINED),
    ]:
        tokens.append(token)
        types.append(kind)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["h e", "t he", "Ġ the"],
        "bos_token_id": 259,
        "eos_token_id": 259,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


WORDS = [
    f"{SPACE_MARK}the",
    f"{SPACE_MARK}t",
    "the",
    "he",
    "th",
    "cat",
    "ca",
    "at",
    "aa",
    "aaa",
    "aaaa",
    "tt",
]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a Llama-2-like vocabulary: BPE ranked by score, bytes for what it lacks."""
    words = [*WORDS, *f"{SPACE_MARK}thecan"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, "<mine>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def sentencepiece_reference(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours with the best score, the leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    rank = {t: (-scores[i], i) for i, t in enumerate(tokens) if types[i] == NORMAL}
    symbols = list((" " + text if text else "").replace(" ", SPACE_MARK))
    while True:
        joined = [(rank[a + b][0], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not joined:
            break
        i = min(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [rank[symbol][1]] if symbol in rank else [3 + b for b in symbol.encode()]
    return ids


def test_byte_level_merges_and_bytes():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.encode("the the") == [257, 258]
    assert tokenizer.encode("hé") == [ord("h"), 0xC3, 0xA9]
    assert tokenizer.token_bytes(258) == b" the"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.vocab_size == 263


def test_control_and_user_defined_tokens():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.encode("<tool>the<|im_end|>") == [262, 257, 260]
    assert tokenizer.special_ids == {259, 260, 261}
    assert tokenizer.decode([262, 257, 260]) == "<tool>the"
    assert tokenizer.encode("<tool>", parse_special=False) == [262]


def test_whole_word_lookup_cannot_make_a_control_token_of_text():
    metadata = byte_level(pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.token_type"][257] = CONTROL  # a control token that is spelled as a word: "the"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("the") == [257]
    ordinary = tokenizer.encode("the", parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ordinary)
    assert tokenizer.decode(ordinary) == "the"


def test_every_named_end_ends_a_generation():
    assert Tokenizer.from_gguf(byte_level()).eos_token_ids == {259, 260, 261}
    assert Tokenizer.from_gguf(byte_level(eot_token_id=262)).eos_token_ids == {259, 260, 261, 262}


def test_a_name_ends_a_generation_only_as_a_control_token():
    metadata = byte_level()
    metadata["tokenizer.ggml.token_type"][260] = USER_DEFINED
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {259, 261}


def test_special_tokens_and_templates_for_chat():
    metadata = byte_level() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|bos|>"}
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}
    assert Tokenizer.from_gguf(byte_level()).chat_template is None


def test_llama3_family_begins_with_bos_unless_told_otherwise():
    assert Tokenizer.from_gguf(byte_level(pre="llama-bpe")).encode("the") == [259, 257]
    assert Tokenizer.from_gguf(byte_level(pre="llama-bpe", add_bos_token=False)).encode("the") == [257]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pre": "no-such"}, "'no-such'"),
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": None}, r"no tokenizer\.ggml\.model"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"merges": ["h x"]}, r"merges does not fit"),
        ({"token_type": [1]}, "1 entries for 263 tokens"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999, outside the vocabulary of 263"),
        ({"bos_token_id": None, "add_bos_token": True}, "adds a BOS token but has no"),
    ],
)
def test_metadata_that_cannot_work_is_refused(changes: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.from_gguf(byte_level(**changes))


def test_a_token_listed_twice_is_refused():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][256] = "the"
    with pytest.raises(CheckpointError, match="1 tokens twice"):
        Tokenizer.from_gguf(metadata)


@given(text=st.text(st.sampled_from("the ca n\nxé漢"), max_size=40))
def test_sentencepiece_is_exactly_its_definition(text: str):
    metadata = sentencepiece()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode(text) == [1, *sentencepiece_reference(text, metadata)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_puts_a_space_before_text_after_control_tokens():
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.token_bytes(the[0]) == b" the"
    assert tokenizer.encode("</s>the", add_special_tokens=False) == [2, *the]
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    assert bare.decode(bare.encode("the")) == "the"
    assert bare.token_bytes(bare.encode("the", add_special_tokens=False)[0]) == b"the"


def test_sentencepiece_pieces_are_bytes():
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert tokenizer.token_bytes(3 + 0xE6) == b"\xe6"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.decode([1, 3 + ord("x"), 2]) == "x"
    ids = tokenizer.encode("</s>", parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids[1:])
    assert tokenizer.decode(ids) == "</s>"


def test_sentencepiece_needs_a_score_for_each_token():
    with pytest.raises(CheckpointError, match="2 entries for"):
        Tokenizer.from_gguf(sentencepiece(scores=[0.0, 1.0]))

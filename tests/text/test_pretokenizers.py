from __future__ import annotations

import unicodedata

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxinfer.errors import CheckpointError
from jaxinfer.text import pretokenizers

DECODER = decoders.ByteLevel()


def words(name: str, text: str) -> list[str]:
    splitter = pretokenizers.byte_level(*pretokenizers.find(name).patterns)
    return [DECODER.decode([word]) for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 12345  ok", ["it", "'s", " 12345", " ", " ok"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345(x)\n\n y", ["IT", "'S", " ", "123", "45", "(x", ")\n\n", " y"]),
        ("llama3", "a  \n b", ["a", "  \n", " b"]),
        ("qwen2", "12 ab", ["1", "2", " ab"]),
        ("deepseek-v3", "x=12345 漢字かな!a", ["x", "=", "123", "45", " ", "漢字かな", "!a"]),
        ("deepseek-llm", "ab 12345\n漢字", ["ab", " ", "12345", "\n", "漢字"]),
        ("deepseek-llm", "àéω2 ok", ["àéω", "2", " ok"]),
        ("kimi-k2", "camelCase漢字かな 12345", ["camel", "Case", "漢字", "かな", " ", "123", "45"]),
        ("kimi-k2", "a/b/\n", ["a", "/b", "/\n"]),
        ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234\n/", ["camel", "Case's", " ", "123", "4", "\n", "/"]),
        ("llama4", "/\n/", ["/\n/"]),
        ("default", "it's $12345", ["it", "'", "s", " ", "$", "123", "45"]),
    ],
)
def test_words(name: str, text: str, expected: list[str]):
    assert words(name, text) == expected
    assert "".join(expected) == text


def test_every_deepseek_llm_letter_has_a_case():
    pattern = pretokenizers.find("deepseek-llm").patterns[1]
    splitter = pre_tokenizers.Split(Regex(pattern), "removed")
    letters = [chr(c) for c in range(0x20000) if not 0xD800 <= c < 0xE000]
    matched = [c for c in letters if not splitter.pre_tokenize_str(c)]
    assert {unicodedata.category(c) for c in matched} == {"Lu", "Ll", "Lt"}
    # U+1F7D, U+1FD3, U+1FDB and U+212A are canonically equal to others and so easily lost in copying.
    assert {chr(c) for c in (0x1F7D, 0x1FD3, 0x1FDB, 0x1FBE, 0x2126, 0x212A)} <= set(matched)
    assert "ª" not in matched


@pytest.mark.parametrize("name", ["llama-bpe", "tekken"])
def test_models_that_take_whole_words_and_begin_with_bos(name: str):
    found = pretokenizers.find(name)
    assert found.ignore_merges
    assert found.add_bos


@pytest.mark.parametrize("name", ["smollm", "qwen2", "kimi-k2", "deepseek-v3", "gpt-4o"])
def test_models_that_merge_and_begin_without(name: str):
    found = pretokenizers.find(name)
    assert not found.ignore_merges
    assert not found.add_bos


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(CheckpointError, match="'bloom-next'"):
        pretokenizers.find("bloom-next")


def test_a_missing_name_is_refused():
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre"):
        pretokenizers.find(None)


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-llm", "deepseek-v3", "gpt-4o"])
def test_no_pattern_loses_text(name: str):
    text = "Ünïcödé — 漢字かな 🙂 123456 don't\r\n\t\tX\u00a0y\u3000。ǅ ª"
    assert "".join(words(name, text)) == text
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pretokenizers.byte_level(*pretokenizers.find(name).patterns)
    assert backend.encode(text).ids == []

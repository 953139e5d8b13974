from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer

Save = Callable[..., Path]


def test_byte_level_directory_encodes_and_decodes_as_its_own_library(byte_level_backend: Backend, save: Save):
    tokenizer = Tokenizer.from_directory(save(byte_level_backend))
    for text in ("the cat", "", "  é漢🙂\n", "<|eot|>the<think>", "no such word"):
        ids = byte_level_backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == byte_level_backend.decode(
                ids, skip_special_tokens=skip
            )
    assert tokenizer.vocab_size == byte_level_backend.get_vocab_size()


def test_bos_is_put_before_ordinary_text_and_never_twice(byte_level_backend: Backend, save: Save):
    tokenizer = Tokenizer.from_directory(
        save(byte_level_backend, tokenizer_config_json={"bos_token": "<|begin|>"})
    )
    bos = byte_level_backend.token_to_id("<|begin|>")
    assert bos is not None
    assert tokenizer.bos_token_id == bos
    assert tokenizer.encode("") == [bos]
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("<|begin|>the") == [bos, *the]
    spelled = tokenizer.encode("<|begin|>the", parse_special=False)
    assert spelled.count(bos) == 1
    assert tokenizer.decode(spelled) == "<|begin|>the"


def test_only_control_tokens_are_special(byte_level_backend: Backend, save: Save):
    tokenizer = Tokenizer.from_directory(save(byte_level_backend))
    think = byte_level_backend.token_to_id("<think>")
    assert think is not None
    assert think not in tokenizer.special_ids
    assert tokenizer.encode("<think>", add_special_tokens=False, parse_special=False) == [think]
    assert tokenizer.decode([think]) == "<think>"


@pytest.mark.parametrize("style", ["legacy", "always", "first", "never"])
def test_sentencepiece_directory_encodes_and_decodes_as_its_own_library(
    sentencepiece_backend, save: Save, style: str
):
    backend = sentencepiece_backend(style)
    tokenizer = Tokenizer.from_directory(save(backend))
    for text in ("the cat on a mat.", "é the", "cat\n</s>the", " the"):
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.decode([3 + 0xE6, 3 + 0xBC]) == "\ufffd"


@pytest.mark.parametrize("style", ["legacy", "always", "first", "never"])
def test_ordinary_text_after_a_control_token_has_the_same_ids(sentencepiece_backend, save: Save, style: str):
    tokenizer = Tokenizer.from_directory(save(sentencepiece_backend(style)))
    whole = tokenizer.encode("the</s>cat", add_special_tokens=False)
    split = [*tokenizer.encode_ordinary("the", first=True), 2, *tokenizer.encode_ordinary("cat", first=False)]
    assert split == whole


def test_metaspace_decoder(sentencepiece_backend, save: Save):
    backend = sentencepiece_backend("always")
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.from_directory(save(backend))
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids) == "the cat"


@given(text=st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_text_comes_back(byte_level_backend: Backend, save: Save, text: str):
    tokenizer = Tokenizer.from_directory(save(byte_level_backend))
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_training_time_truncation_and_padding_are_off(byte_level_backend: Backend, save: Save):
    backend = Backend.from_str(byte_level_backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(save(backend))
    assert (
        tokenizer.encode("the cat sat on the mat") == byte_level_backend.encode("the cat sat on the mat").ids
    )


def test_ends_come_from_configuration_and_generation_config(byte_level_backend: Backend, save: Save):
    eot, end = byte_level_backend.token_to_id("<|eot|>"), byte_level_backend.token_to_id("<|end|>")
    path = save(
        byte_level_backend,
        tokenizer_config_json={"eos_token": {"content": "<|end|>"}},
        generation_config_json={"eos_token_id": [eot, end]},
    )
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.eos_token_ids == {eot, end}
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}


def test_special_tokens_map_fills_in_and_unknown_spellings_are_left_out(
    byte_level_backend: Backend, save: Save
):
    path = save(
        byte_level_backend,
        tokenizer_config_json={"pad_token": "<not there>"},
        special_tokens_map_json={"bos_token": "<|begin|>"},
        generation_config_json={"eos_token_id": 5},
    )
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>"}
    assert tokenizer.eos_token_ids == {5}


def test_a_token_the_configuration_calls_special_is(byte_level_backend: Backend, save: Save):
    path = save(byte_level_backend, tokenizer_config_json={"eos_token": "<think>"})
    tokenizer = Tokenizer.from_directory(path)
    think = byte_level_backend.token_to_id("<think>")
    assert think in tokenizer.special_ids
    assert think not in tokenizer.encode("<think>", parse_special=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config_json": {"chat_template": "config"}}, {"default": "config"}),
        (
            {
                "tokenizer_config_json": {
                    "chat_template": [
                        {"name": "default", "template": "a"},
                        {"name": "tool_use", "template": "b"},
                    ]
                }
            },
            {"default": "a", "tool_use": "b"},
        ),
        (
            {
                "tokenizer_config_json": {"chat_template": "config"},
                "chat_template_json": {"chat_template": "json"},
            },
            {"default": "json"},
        ),
        (
            {"chat_template_json": {"chat_template": "json"}, "chat_template_jinja": "file"},
            {"default": "file"},
        ),
        ({}, {}),
    ],
)
def test_where_the_chat_template_comes_from(
    byte_level_backend: Backend, save: Save, files: dict[str, Any], expected: dict
):
    assert Tokenizer.from_directory(save(byte_level_backend, **files)).chat_templates == expected


def test_bad_directories_are_named(byte_level_backend: Backend, save: Save, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor tiktoken.model"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(save(tokenizer_json="{"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id 9999"):
        Tokenizer.from_directory(save(byte_level_backend, generation_config_json={"eos_token_id": 9999}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.from_directory(save(byte_level_backend, tokenizer_config_json="{oops"))
    with pytest.raises(CheckpointError, match=r"must hold a JSON object, not list"):
        Tokenizer.from_directory(save(byte_level_backend, tokenizer_config_json=[1]))


def test_a_decoder_that_is_not_bytes_is_refused(save: Save):
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match=r"decoder none is not supported"):
        Tokenizer.from_directory(save(backend))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"WordPiece"):
        Tokenizer.from_directory(save(backend))

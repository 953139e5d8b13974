"""A tokenizer from the metadata of a GGUF file (keys `tokenizer.*`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from jaxinfer.errors import CheckpointError
from jaxinfer.text import pretokenizers
from jaxinfer.text.parts import (
    SPACE_MARK,
    TokenizerParts,
    byte_level_pieces,
    merges_by_priority,
    sentencepiece_pieces,
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn or a text by their name; files often give only one of them as eos_token_id.
_END_NAMES = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "[EOS]",
        "[EOT]",
    )
)
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Builds the tokenizer that `metadata` describes; CheckpointError if it is incomplete or of an unknown kind."""
    tokens: list[str] = list(_require(metadata, "tokens"))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice")
    types: list[int] = list(_get(metadata, "token_type") or [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")

    model = _require(metadata, "model")
    if model == "gpt2":
        pre = pretokenizers.find(_get(metadata, "pre"))
        backend = _byte_level_bpe(vocab, _require(metadata, "merges"), pre)
        literal = [i for i, kind in enumerate(types) if kind not in (TokenType.NORMAL, TokenType.UNUSED)]
        pieces = byte_level_pieces(tokens, literal)
        add_bos, add_eos, space_prefix = pre.add_bos, False, False
    elif model == "llama":
        space_prefix = bool(_get(metadata, "add_space_prefix", True))
        backend = _sentencepiece_bpe(vocab, _require(metadata, "scores"), types, space_prefix=space_prefix)
        literal = [i for i, kind in enumerate(types) if kind in (TokenType.UNKNOWN, TokenType.CONTROL)]
        pieces = sentencepiece_pieces(tokens, literal, byte_tokens=True)
        add_bos, add_eos = True, False
    else:
        raise CheckpointError(f"GGUF tokenizer model {model!r} is not supported; known: gpt2, llama")

    special = [i for i, kind in enumerate(types) if kind in (TokenType.UNKNOWN, TokenType.CONTROL)]
    user_defined = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED]
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in user_defined])
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])

    named = {key: _token_id(metadata, name, len(tokens)) for key, name in _SPECIAL_KEYS.items()}
    bos, eos = named["bos_token"], named["eos_token"]
    ends = {eos, *(_token_id(metadata, name, len(tokens)) for name in ("eot_token_id", "eom_token_id"))}
    ends |= {i for i in special if tokens[i] in _END_NAMES and types[i] == TokenType.CONTROL}
    return TokenizerParts(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_ids=frozenset(i for i in ends if i is not None),
        prefix_ids=_added("bos", bool(_get(metadata, "add_bos_token", add_bos)), bos),
        suffix_ids=_added("eos", bool(_get(metadata, "add_eos_token", add_eos)), eos),
        special_tokens={key: tokens[i] for key, i in named.items() if i is not None},
        chat_templates=_chat_templates(metadata),
        strip_leading_space=space_prefix,
    )


def _byte_level_bpe(
    vocab: dict[str, int], merges: Sequence[str], pre: pretokenizers.PreTokenizer
) -> Tokenizer:
    # A merge is "left right"; a left half may itself begin with a space.
    pairs = [(m[: (cut := m.find(" ", 1))], m[cut + 1 :]) for m in merges]
    try:
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pretokenizers.byte_level(*pre.patterns)
    return backend


def _sentencepiece_bpe(
    vocab: dict[str, int], scores: Sequence[float | int], types: Sequence[int], *, space_prefix: bool
) -> Tokenizer:
    if len(scores) != len(vocab):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab)} tokens")
    # Only ordinary tokens may come out of merging: a control token that text spells stays text.
    priority = {token: scores[i] for token, i in vocab.items() if types[i] == TokenType.NORMAL}
    unknown = next((token for token, i in vocab.items() if types[i] == TokenType.UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_by_priority(priority),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if space_prefix else spaces
    )
    return backend


def _get(metadata: Mapping[str, Any], name: str, default: Any = None) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}", default)


def _require(metadata: Mapping[str, Any], name: str) -> Any:
    value = _get(metadata, name)
    if value is None:
        raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{name}, so its text cannot be tokenized")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = _get(metadata, name)
    if value is not None and not 0 <= int(value) < size:
        raise CheckpointError(f"tokenizer.ggml.{name} is {value}, outside the vocabulary of {size}")
    return None if value is None else int(value)


def _added(name: str, wanted: bool, token_id: int | None) -> tuple[int, ...]:
    if wanted and token_id is None:
        raise CheckpointError(
            f"the GGUF file adds a {name.upper()} token but has no tokenizer.ggml.{name}_token_id"
        )
    return (token_id,) if wanted and token_id is not None else ()


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates") or ()}
    return {name: source for name, source in {**named, "default": metadata.get(key)}.items() if source}

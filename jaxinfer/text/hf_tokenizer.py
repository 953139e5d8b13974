"""A tokenizer from a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxinfer.errors import CheckpointError
from jaxinfer.text import tiktoken
from jaxinfer.text.parts import SPACE_MARK, TokenizerParts, byte_level_pieces, sentencepiece_pieces

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load(path: Path) -> TokenizerParts:
    """Reads tokenizer.json (or tiktoken.model) and the files beside it; CheckpointError names a bad one."""
    config = read_json(path / "tokenizer_config.json")
    is_kimi = False
    if (path / "tokenizer.json").is_file():
        backend = _read_backend(path / "tokenizer.json")
    elif (path / "tiktoken.model").is_file():
        backend = tiktoken.load(path / "tiktoken.model", config)
        is_kimi = True
    else:
        raise CheckpointError(
            f"{path} has neither tokenizer.json nor tiktoken.model: it holds no tokenizer we can read"
        )

    named = _special_tokens(config, read_json(path / "special_tokens_map.json"))
    named = {key: token for key, token in named.items() if backend.token_to_id(token) is not None}
    _mark_special(backend, named)
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (1 + max(vocab.values(), default=-1))
    for token, i in vocab.items():
        tokens[i] = token
    pieces, strip = _pieces(path, backend, tokens, list(added))

    ends = _end_ids(path, len(tokens))
    if "eos_token" in named:
        ends.add(vocab[named["eos_token"]])
    return TokenizerParts(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        bos_token_id=vocab[named["bos_token"]] if "bos_token" in named else None,
        eos_token_ids=frozenset(ends),
        special_tokens=named,
        chat_templates=_chat_templates(path, config),
        strip_leading_space=strip,
        kimi_tools=is_kimi,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _read_backend(path: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer we can read: {error}") from error
    # A file saved in training may still cut or pad every text.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for key in _SPECIAL_NAMES:
            value = source.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content:
                found.setdefault(key, content)
    return found


def _mark_special(backend: Tokenizer, named: dict[str, str]) -> None:
    """What the configuration calls special is special, also where tokenizer.json forgot to say so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = dict.fromkeys(token for token in named.values() if token not in known)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _end_ids(path: Path, size: int) -> set[int]:
    value = read_json(path / "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or not 0 <= i < size:
            raise CheckpointError(
                f"{path / 'generation_config.json'}: eos_token_id {i} is outside the vocabulary of {size}"
            )
    return set(ids)


def _pieces(path: Path, backend: Tokenizer, tokens: list[str], added: list[int]) -> tuple[list[bytes], bool]:
    """The bytes of every token, and whether the decoder takes one leading space away."""
    steps: list[dict[str, Any]] = []
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level_pieces(tokens, added), False
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strip, mark = False, SPACE_MARK
        for step in steps:
            if step["type"] == "Replace":
                mark = step["pattern"].get("String")
                if step["content"] != " " or not mark:
                    raise CheckpointError(f"{path / 'tokenizer.json'}: decoder step {step} is not supported")
            elif step["type"] == "Strip":
                strip = step["content"] == " " and step["start"] > 0
            elif step["type"] == "Metaspace":
                mark, strip = step["replacement"], step["prepend_scheme"] != "never"
        pieces = sentencepiece_pieces(tokens, added, byte_tokens="ByteFallback" in kinds, space_mark=mark)
        return pieces, strip
    raise CheckpointError(
        f"{path / 'tokenizer.json'}: decoder {sorted(kinds) or 'none'} is not supported; "
        "known: ByteLevel, and SentencePiece's (Metaspace, or Replace with ByteFallback, Fuse, Strip)"
    )


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own goes before chat_template.json and tokenizer_config.json."""
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), read_json(path / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found |= {entry["name"]: entry["template"] for entry in value}
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found

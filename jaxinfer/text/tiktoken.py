"""A byte-level BPE from a tiktoken.model file, the only tokenizer file Kimi K2 directories have."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxinfer.errors import CheckpointError
from jaxinfer.text.parts import merges_by_priority, spell_bytes
from jaxinfer.text.pretokenizers import KIMI_K2_PATTERN, byte_level

_NUM_SPECIAL = 256  # ids that Kimi's tokenizer code keeps for control tokens after the ranks


def load(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Reads `base64 rank` lines; `config` (tokenizer_config.json) names the control tokens that follow.

    CheckpointError when a line cannot be read, or when the directory is not one of Kimi's: the file does
    not hold the regex that cuts text into words, so it must be known.
    """
    if not str(config.get("tokenizer_class", "")).startswith("TikToken"):
        raise CheckpointError(
            f"{path}: only Kimi's tiktoken files are known (tokenizer_class TikTokenTokenizer), "
            f"not {config.get('tokenizer_class')!r}"
        )
    vocab: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            vocab[spell_bytes(base64.b64decode(token, validate=True))] = int(rank)
        except ValueError as error:
            raise CheckpointError(f"{path}: line {number} is not 'base64 rank': {error}") from error
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise CheckpointError(f"{path}: the ranks of its {len(vocab)} tokens do not run from 0 without a gap")

    merges = merges_by_priority({token: -rank for token, rank in vocab.items()})
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = byte_level(KIMI_K2_PATTERN)
    backend.decoder = decoders.ByteLevel()
    names = {int(i): entry["content"] for i, entry in config.get("added_tokens_decoder", {}).items()}
    ids = range(len(vocab), len(vocab) + _NUM_SPECIAL)
    backend.add_special_tokens(
        [AddedToken(names.get(i, f"<|reserved_token_{i}|>"), special=True, normalized=False) for i in ids]
    )
    return backend

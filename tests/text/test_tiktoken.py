from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer

WORDS = [
    b"he",
    b"th",
    b"the",
    b" the",
    b" t",
    b"aa",
    b"aaa",
    "漢".encode(),
    "漢".encode()[:2],
    b"an",
    b"and",
    b"nd",
]
RANKS = {bytes([b]): b for b in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
CONFIG = """{"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
  "added_tokens_decoder": {"268": {"content": "[BOS]"}, "269": {"content": "[EOS]"}, "280": {"content": "<|im_end|>"}}}"""


def write(path: Path, ranks: dict[bytes, int] = RANKS, config: str = CONFIG) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (path / "tokenizer_config.json").write_text(config)
    return path


def reference(word: bytes) -> list[int]:
    """tiktoken's own rule for one word: join the pair of lowest rank, the leftmost first."""
    if word in RANKS:
        return [RANKS[word]]
    parts = [bytes([b]) for b in word]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(word=st.text(st.sampled_from("theand"), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_merges_are_tiktokens(tmp_path: Path, word: str):
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    assert tokenizer.encode(word) == reference(word.encode())


def test_control_tokens_follow_the_ranks(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    assert tokenizer.vocab_size == len(RANKS) + 256
    assert tokenizer.bos_token_id == 268
    assert tokenizer.eos_token_ids == {269}
    assert tokenizer.encode("the<|im_end|>") == [258, 280]
    assert tokenizer.token_text(270) == "<|reserved_token_270|>"
    assert tokenizer.decode(tokenizer.encode("the 漢字!")) == "the 漢字!"
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("<|im_end|>", parse_special=False))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="do not run from 0"):
        Tokenizer.from_directory(write(tmp_path, {b"a": 0, b"b": 2}))
    with pytest.raises(CheckpointError, match="only Kimi's"):
        Tokenizer.from_directory(write(tmp_path, config="{}"))
    write(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n!! 1\n")
    with pytest.raises(CheckpointError, match="line 2"):
        Tokenizer.from_directory(tmp_path)

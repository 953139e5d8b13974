from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxinfer.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat. the hat is on the cat", "on the mat, in the hat: 12 cats"] * 4


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in GGUFReader(smollm2_path).fields.items()}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def byte_level_backend() -> Backend:
    """A little Llama-3-like tokenizer: byte-level BPE with BOS in the post-processor and one ordinary added token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|eot|>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]
    )
    return backend


@pytest.fixture(scope="session")
def sentencepiece_backend() -> Callable[[str], Backend]:
    """Makes a little Llama-2-like tokenizer; style "legacy" or one of Metaspace's prepend schemes."""

    def make(style: str) -> Backend:
        vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁thecaonmsi."]
        merges = [
            ("▁", "t"),
            ("h", "e"),
            ("▁t", "he"),
            ("a", "t"),
            ("c", "at"),
            ("▁", "cat"),
            ("o", "n"),
            ("▁", "on"),
        ]
        vocab += ["".join(pair) for pair in merges]
        backend = Backend(
            models.BPE(
                vocab={token: i for i, token in enumerate(vocab)},
                merges=merges,
                unk_token="<unk>",
                byte_fallback=True,
            )
        )
        backend.add_special_tokens(["<unk>", "<s>", "</s>"])
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if style == "legacy":
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
        if style != "never":
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return backend

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory: the backend as tokenizer.json, and files by name (text, or JSON of a value)."""

    def write(backend: Backend | None = None, **files: Any) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, value in files.items():
            stem, _, ending = name.rpartition("_")
            text = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / f"{stem}.{ending}").write_text(text, encoding="utf-8")
        return tmp_path

    return write

"""The files that come with weights, so that a saved model has its tokenizer too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from jaxinfer.text.tokenizer import Tokenizer

PARAMETERS = "parameters.json"  # describes saved parameters, and so marks a directory of them
_COPIED = ("*.json", "*.jinja", "*.tiktoken", "tiktoken.model", "tokenizer.model")
_OWN = ("config.json", "generation_config.json", PARAMETERS)  # written anew
_TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_GGUF_METADATA = "tokenizer.gguf.msgpack"


def copy_companions(source: Path, folder: Path) -> None:
    """Copies the small files of a Hugging Face directory but for config.json and the index of its weights."""
    for pattern in (*_COPIED, _GGUF_METADATA):
        for file in source.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, folder / file.name)


def write_gguf_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Keeps what a GGUF file says about its tokenizer."""
    kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    content = msgpack.packb(kept)
    assert isinstance(content, bytes)
    (folder / _GGUF_METADATA).write_bytes(content)


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that lies in a directory, None when there is none."""
    if any((folder / name).exists() for name in _TOKENIZERS):
        return Tokenizer.from_directory(folder)
    if (folder / _GGUF_METADATA).exists():
        return Tokenizer.from_gguf(msgpack.unpackb((folder / _GGUF_METADATA).read_bytes()))
    return None

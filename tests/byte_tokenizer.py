"""A small real tokenizer: one token a byte, then control tokens; a chat template in ChatML's manner."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxinfer.text.parts import spell_bytes
from jaxinfer.text.tokenizer import Tokenizer

EOS, START, END, BOS = 256, 257, 258, 259
VOCAB_SIZE = 260
_SPECIALS = ("<eos>", "<|im_start|>", "<|im_end|>", "<bos>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(folder: Path, *, bos: bool = False) -> None:
    """Writes tokenizer.json and tokenizer_config.json: token id b is byte b; with `bos`, texts begin with BOS."""
    spelling = [spell_bytes(bytes([b])) for b in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(spelling)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in _SPECIALS])
    if bos:
        backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": _CHAT_TEMPLATE} | ({"bos_token": "<bos>"} if bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """The same, loaded."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), bos=bos)
        return Tokenizer.from_directory(Path(folder))

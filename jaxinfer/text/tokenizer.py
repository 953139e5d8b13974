"""Text to token ids and back, for every model we serve."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.errors import RequestError
from jaxinfer.text import gguf_tokenizer, hf_tokenizer
from jaxinfer.text.parts import TokenizerParts
from jaxinfer.text.spellings import SpecialSpellings


class Tokenizer:
    """A model's tokenizer. Safe to share between threads.

    Decoding is `bytes.decode("utf-8", errors="replace")` of the tokens' bytes, so a byte that is not UTF-8
    shows as U+FFFD. Ids outside the vocabulary decode to nothing: a stray id costs a request some text at
    worst, never the engine.

    Attributes:
      vocab_size: ids of this tokenizer lie in [0, vocab_size); the model's head may be padded beyond it.
      bos_token_id: begin-of-sequence id, or None.
      eos_token_ids: every id that ends a generation.
      special_ids: ids of control tokens.
      special_tokens: "bos_token", "eos_token", … → spelling, as chat templates see them.
      chat_templates: name → Jinja source ("default", perhaps "tool_use").
      strip_leading_space: decoding takes away the one space that encoding puts before a text.
      kimi_tools: chat templates get tools as `jaxinfer.text.kimi_tools` makes them.
    """

    def __init__(self, parts: TokenizerParts):
        self._backend = parts.backend
        self._pieces = parts.pieces
        self._prefix_ids = list(parts.prefix_ids)
        self._suffix_ids = list(parts.suffix_ids)
        self.vocab_size = len(parts.pieces)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = parts.special_ids
        self.special_tokens = dict(parts.special_tokens)
        self.chat_templates = dict(parts.chat_templates)
        self.strip_leading_space = parts.strip_leading_space
        self.kimi_tools = parts.kimi_tools

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Reads a Hugging Face directory: tokenizer.json (or Kimi's tiktoken.model) and the files beside it."""
        return cls(hf_tokenizer.load(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds it from a GGUF file's key-value pairs as plain Python values."""
        return cls(gguf_tokenizer.load(metadata))

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens puts BOS and EOS where the model wants them, but no second BOS before a text that
        spells one. With parse_special off, text that spells a control token is ordinary text: the result
        then holds no control id beside those that add_special_tokens adds.
        """
        backend = self._backend if parse_special else self._ordinary
        ids = self._encode(backend, text, add_special_tokens, keep_special=parse_special)
        if not add_special_tokens:
            return ids
        ids = [*self._prefix_ids, *ids, *self._suffix_ids]
        return self.drop_double_bos(ids) if self._adds_bos else ids

    def encode_ordinary(self, text: str, *, first: bool) -> list[int]:
        """Ids of text in which nothing is a control token; `first` if the prompt begins with it.

        Some tokenizers put a space before the first text of a prompt, but not after a control token.
        """
        return self._encode(
            self._ordinary if first else self._ordinary_inner, text, False, keep_special=False
        )

    def drop_double_bos(self, ids: list[int]) -> list[int]:
        """The same ids with one BOS at the start where there were several."""
        bos = self.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        pieces = self.piece_table(skip_special_tokens)
        size = self.vocab_size
        text = b"".join([pieces[i] for i in ids if 0 <= i < size]).decode("utf-8", errors="replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, control tokens spelled out; b"" outside the vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no character of their own show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._pieces))

    def piece_table(self, skip_special_tokens: bool) -> list[bytes]:
        """Bytes of every id, empty for control tokens if they are skipped. Not to be changed."""
        return self._shown_pieces if skip_special_tokens else self._pieces

    def text_table(self, skip_special_tokens: bool) -> list[str | None]:
        """Text of every id that is whole characters, else None. Not to be changed."""
        return self._shown_texts if skip_special_tokens else self._texts

    @cached_property
    def special_spellings(self) -> SpecialSpellings:
        """How control tokens are spelled in text."""
        return SpecialSpellings(self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _adds_bos(self) -> bool:
        return self.bos_token_id in (
            *self._prefix_ids,
            *self._backend.encode("", add_special_tokens=True).ids,
        )

    @cached_property
    def _shown_pieces(self) -> list[bytes]:
        shown = list(self._pieces)
        for i in self.special_ids:
            shown[i] = b""
        return shown

    @cached_property
    def _texts(self) -> list[str | None]:
        return [_text_or_none(piece) for piece in self._pieces]

    @cached_property
    def _shown_texts(self) -> list[str | None]:
        shown = list(self._texts)
        for i in self.special_ids:
            shown[i] = ""
        return shown

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        """A second front on the same model that does not look for control tokens."""
        front = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(self._backend, part) is not None:
                setattr(front, part, getattr(self._backend, part))
        # In the order of their ids, so that those beyond the model's vocabulary get the same ones again.
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            front.add_tokens([token])
        front.encode_special_tokens = True
        return front

    @cached_property
    def _ordinary_inner(self) -> tokenizers.Tokenizer:
        """The same for text that follows a control token."""
        splitter = self._backend.pre_tokenizer
        state = b"" if splitter is None else splitter.__getstate__()
        if b'"prepend_scheme":"first"' not in state:
            return self._ordinary
        inner = tokenizers.pre_tokenizers.Sequence([])
        inner.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
        front = copy.deepcopy(self._ordinary)
        front.pre_tokenizer = inner
        return front

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, add: bool, *, keep_special: bool
    ) -> list[int]:
        try:
            # As a batch it lets go of the GIL; "fast" leaves offsets out, which nobody here asks for.
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add)
        except TypeError as error:  # what tokenizers says of half a surrogate pair
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error
        ids: list[int] = encoding.ids
        if keep_special or self.special_ids.isdisjoint(ids):
            return ids
        # Merging itself can make a control token where the vocabulary is searched for whole words.
        out: list[int] = []
        for i, added in zip(ids, encoding.special_tokens_mask, strict=True):
            if added or i not in self.special_ids:
                out.append(i)
            elif len(word := self.token_text(i)) > 1:
                for half in (word[: len(word) // 2], word[len(word) // 2 :]):
                    out += self.encode_ordinary(half, first=False)
        return out


def _text_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None

"""Sampling parameters that are text, made into what the engine knows: token ids."""

from __future__ import annotations

from jaxinfer.engine.request import SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer

_MAX_BAD_WORDS = 128


def tokenize_params(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The same parameters with bad_words among bad_words_ids: each word at the start of a text and after a space.

    Raises:
      RequestError: more than 128 sequences; or bad_words or stop without a tokenizer to read or write text with.
    """
    if tokenizer is None:
        for name, instead in (("bad_words", "bad_words_ids"), ("stop", "stop_token_ids")):
            if getattr(params, name):
                raise RequestError(
                    f"{name} needs a tokenizer, and this model has none: give {instead} instead", param=name
                )
        return params
    if not params.bad_words:
        return params
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word.strip(), " " + word.strip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                sequences[ids] = None
    if len(sequences) > _MAX_BAD_WORDS:
        raise RequestError(
            f"at most {_MAX_BAD_WORDS} bad words after tokenisation, got {len(sequences)}", param="bad_words"
        )
    return params.replace(bad_words=(), bad_words_ids=(*params.bad_words_ids, *sequences))

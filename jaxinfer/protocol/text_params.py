"""Sampling parameters that are text, made into what the engine knows: token ids."""

from __future__ import annotations

from jaxinfer.engine.request import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer


def tokenize_params(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The same parameters with bad_words among bad_words_ids: each word at the start of a text and after a space.

    Raises:
      RequestError: more than 128 words or sequences, or a word of more than 256 characters; or bad_words or stop without a tokenizer to read or write text with.
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
    if len(params.bad_words) > MAX_BAD_WORDS:  # before the work of tokenising them
        raise RequestError(
            f"at most {MAX_BAD_WORDS} bad words, got {len(params.bad_words)}", param="bad_words"
        )
    longest = max(map(len, params.bad_words))
    if longest > MAX_BAD_WORD_CHARS:
        raise RequestError(
            f"a bad word may have at most {MAX_BAD_WORD_CHARS} characters, got {longest}", param="bad_words"
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word.strip(), " " + word.strip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                sequences[ids] = None
    if len(sequences) > MAX_BAD_WORDS:
        raise RequestError(
            f"at most {MAX_BAD_WORDS} bad words after tokenisation, got {len(sequences)}", param="bad_words"
        )
    return params.replace(bad_words=(), bad_words_ids=(*params.bad_words_ids, *sequences))

"""Log-probabilities in OpenAI's two shapes, and vLLM's prompt_logprobs.

JSON has no infinities: a log-probability below -9999 (a token that was masked) is shown as -9999, as vLLM does.
Where the model has no tokenizer a token is spelled "token_id:5", vLLM's way of showing ids in place of text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.request import TokenLogprob
from jaxinfer.text.tokenizer import Tokenizer

_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`, one a token."""
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [_chat_token(i, logprob, tokenizer) for i, logprob in entry.top],
            }
            for entry in entries
        ]
    }


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    tokenizer: Tokenizer | None,
    *,
    text_length: int,
    skip_special_tokens: bool,
    prompt_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Parallel arrays tokens, token_logprobs, top_logprobs, text_offset.

    Args:
      token_ids: of the choice's whole text, an echoed prompt included.
      entries: one a token; None (the first token of a prompt) is null in the arrays.
      text_length: characters of the choice's text; tokens that a stop string cut away have their offset at its end.
      prompt_ids: what came before the text and is not in it.
    """
    offsets = text_offsets(token_ids, tokenizer, skip_special_tokens, prompt_ids)
    return {
        "tokens": [_token_text(i, tokenizer) for i in token_ids],
        "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
        "top_logprobs": [None if e is None else _by_text(e, tokenizer) for e in entries],
        "text_offset": [min(offset, text_length) for offset in offsets],
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token null or `{id: {logprob, rank, decoded_token}}`.

    `rank` counts from 1; it is null for a prompt token that is not among the most likely ones asked for.
    """
    shown: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranked: list[tuple[int, float, int | None]] = [
            (i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top, 1)
        ]
        if all(i != entry.token_id for i, _ in entry.top):
            ranked.append((entry.token_id, entry.logprob, None))
        shown.append(
            {
                str(i): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": _token_text(i, tokenizer),
                }
                for i, logprob, rank in ranked
            }
        )
    return shown


def text_offsets(
    token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    skip_special_tokens: bool,
    prompt_ids: Sequence[int] = (),
) -> list[int]:
    """Where each token starts in the text decoded after `prompt_ids`, in characters; 0 without a tokenizer.

    A token that only goes on with a character begun by the one before it starts where that character does.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    pieces = tokenizer.piece_table(skip_special_tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    length = 0
    # The space that decoding takes away at the start of a text is still to come.
    untouched = tokenizer.strip_leading_space and tokenizer.special_ids.issuperset(prompt_ids)
    for i in token_ids:
        offsets.append(length)
        text = decoder.decode(pieces[i]) if 0 <= i < len(pieces) else ""
        if text and untouched:
            untouched = False
            text = text.removeprefix(" ")
        length += len(text)
    return offsets


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _by_text(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Most likely first, the chosen token always among them; of two tokens with one spelling the likelier stays."""
    shown: dict[str, float] = {}
    for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
        shown.setdefault(_token_text(token_id, tokenizer), _finite(logprob))
    return shown


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _finite(logprob: float) -> float:
    return _LOWEST if math.isnan(logprob) else max(logprob, _LOWEST)

"""What a loader hands to `Tokenizer`, and how a token's spelling in a vocabulary becomes bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import tokenizers

SPACE_MARK = "▁"  # U+2581, SentencePiece's spelling of a space


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer taken apart, whatever file it came from.

    Attributes:
      backend: does the splitting and merging; its added tokens have the model's ids.
      pieces: the exact bytes each id stands for in text, b"" for an id nobody uses; one for each id.
      special_ids: control tokens: hidden from text, and never to be made from untrusted text.
      prefix_ids, suffix_ids: put around a text by add_special_tokens, beside what `backend` adds itself.
      special_tokens: "bos_token", "eos_token", … → spelling, as chat templates see them.
      chat_templates: name → Jinja source; "default" and perhaps "tool_use".
      strip_leading_space: the encoder puts a space before a text, so the decoder takes one away.
      kimi_tools: chat templates get tools as `kimi_tools` makes them.
    """

    backend: tokenizers.Tokenizer
    pieces: list[bytes]
    special_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    strip_leading_space: bool = False
    kimi_tools: bool = False


def _byte_alphabet() -> dict[int, int]:
    """Code point → byte of GPT-2's printable spelling: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
_FORWARD = {byte: chr(point) for point, byte in _ALPHABET.items()}
# 0..255 that spell no byte must not slip through translate(), which leaves unmapped characters alone.
_TRANSLATE = dict.fromkeys(range(256), 0xFFFD) | _ALPHABET


def spell_bytes(data: bytes) -> str:
    """Spells bytes in GPT-2's byte-level alphabet."""
    return data.decode("latin-1").translate(_FORWARD)


def byte_level_pieces(tokens: Sequence[str], literal_ids: Iterable[int]) -> list[bytes]:
    """Bytes of each token of a byte-level vocabulary; `literal_ids` are spelled as plain text.

    A token with a character outside the alphabet is taken as plain text too, as Hugging Face's decoder does.
    """
    literal = set(literal_ids)
    words = ["" if i in literal else token for i, token in enumerate(tokens)]
    try:
        # One translation of everything: each character is one byte, so lengths give the cuts.
        data = "".join(words).translate(_TRANSLATE).encode("latin-1")
        pieces = [data[a:b] for a, b in pairwise(accumulate(map(len, words), initial=0))]
    except UnicodeEncodeError:
        pieces = [_byte_level_piece(word) for word in words]
    for i in literal:
        pieces[i] = tokens[i].encode()
    return pieces


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_TRANSLATE).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_pieces(
    tokens: Sequence[str], literal_ids: Iterable[int], *, byte_tokens: bool, space_mark: str = SPACE_MARK
) -> list[bytes]:
    """Bytes of each token of a SentencePiece vocabulary: `▁` is a space, and `<0x0A>` a byte if byte_tokens."""
    literal = set(literal_ids)
    values = {f"<0x{b:02X}>": bytes([b]) for b in range(256)} if byte_tokens else {}
    return [
        token.encode() if i in literal else values.get(token) or token.replace(space_mark, " ").encode()
        for i, token in enumerate(tokens)
    ]


def merges_by_priority(priority: Mapping[str, float | int]) -> list[tuple[str, str]]:
    """BPE merges, first the most urgent, of a vocabulary that ranks whole tokens and not pairs.

    SentencePiece's BPE and tiktoken both join, again and again, the two neighbours whose concatenation has
    the highest priority. Listing every way to cut a token in two gives the same result with ranked pairs.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(priority, key=priority.__getitem__, reverse=True):
        cuts = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in priority and token[i:] in priority
        ]
        # Within one token the order only matters where it overlaps itself; Hugging Face puts urgent halves first.
        merges += (
            sorted(cuts, key=lambda cut: (-priority[cut[0]], -priority[cut[1]])) if len(cuts) > 1 else cuts
        )
    return merges

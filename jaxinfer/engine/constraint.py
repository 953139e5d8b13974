"""Grammars that an answer must follow: from a `Constraint` to the set of tokens that may come next (llguidance).

No JAX here. A matcher costs tens of microseconds a token; compiling a grammar can take a second, so callers on a server compile
ahead, on a thread of their own (`GrammarCompiler.compile` keeps what it made).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable

import llguidance
import numpy as np

from jaxinfer.engine.request import Constraint
from jaxinfer.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer

_MAX_KEPT = 128  # compiled grammars
_MAX_KEPT_BYTES = 8 * 2**20  # of their sources


class Matcher:
    """One completion's place in its grammar."""

    def __init__(self, state: llguidance.LLMatcher, vocab_size: int):
        self._state = state
        self._words = -(-vocab_size // 32)
        self._consumed = 0

    @property
    def gave_up(self) -> bool:
        """Following the grammar took more than llguidance's limits, so that no token is allowed any more."""
        return self._state.is_error()

    def mask(self, generated: list[int]) -> np.ndarray:
        """Bits of the tokens that may follow these, int32 [V / 32], token i in bit i % 32 of word i // 32.

        Called with ever longer lists of the same completion's tokens. No bit is set once the grammar has no way on.
        """
        for token in generated[self._consumed :]:
            self._state.consume_token(token)
        self._consumed = len(generated)
        bits = np.zeros(self._words, np.int32)
        if not self._state.is_error() and not (self._state.is_stopped() and not self._state.is_accepting()):
            self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """end_ids: tokens that end a text; allowed exactly where the grammar is complete."""
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._end_ids = sorted(i for i in end_ids if i < vocab_size)
        self._vocabulary: llguidance.LLTokenizer | None = (
            None  # made when first needed: a second for 100,000 tokens
        )
        self._kept: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at the grammar's start.

        Raises:
          RequestError: the grammar is wrong, too complex, or asks for something that cannot be enforced.
        """
        with self._lock:
            base = self._kept.get(constraint)
            if base is not None:
                self._kept.move_to_end(constraint)
        if base is None:
            base = self._compile(constraint)
            with self._lock:
                self._kept[constraint] = base
                while len(self._kept) > _MAX_KEPT or self._kept_bytes() > _MAX_KEPT_BYTES:
                    self._kept.popitem(last=False)
        return Matcher(base.deep_copy(), self._vocab_size)

    def _kept_bytes(self) -> int:
        return sum(len(constraint.value) for constraint in self._kept)

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        try:
            grammar = _grammar(constraint)
            state = llguidance.LLMatcher(self._tokens(), grammar, log_level=0)
        except ValueError as error:
            raise _refusal(constraint, str(error)) from None
        if state.is_error():
            raise _refusal(constraint, state.get_error())
        # Limits of size show when a mask is made; of what copies share, as the lexer, at the second time.
        for _ in range(2):
            trial = state.deep_copy()
            Matcher(trial, self._vocab_size).mask([])
            if trial.is_error():
                raise _refusal(constraint, trial.get_error())
        warnings = state.get_grammar_warnings()
        if warnings:  # a keyword that would not be enforced
            raise _refusal(constraint, warnings[0])
        return state

    def _tokens(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                wrapper = llguidance.TokenizerWrapper(
                    _Vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
                )
                self._vocabulary = llguidance.LLTokenizer(
                    wrapper, n_vocab=self._vocab_size, eos_token=self._end_ids
                )
            return self._vocabulary


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]):
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self._tokenizer = tokenizer
        pieces = tokenizer.piece_table(False)
        self.tokens = [pieces[i] if i < len(pieces) else b"" for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode_ordinary(text, first=False)


def _grammar(constraint: Constraint) -> str:
    make = llguidance.LLMatcher
    if constraint.kind == "json_object":
        return make.grammar_from_json_schema({"type": "object"})
    if constraint.kind == "json_schema":
        return make.grammar_from_json_schema(constraint.value)
    if constraint.kind == "regex":
        return make.grammar_from_regex(constraint.value)
    if constraint.kind == "choice":
        # One expression: as alternatives of a grammar more than 2000 are too many.
        return make.grammar_from_regex("|".join(map(_escaped, json.loads(constraint.value))))
    return llguidance.grammar_from("grammar", constraint.value)


def _escaped(text: str) -> str:
    """A regular expression for this very text."""
    return "".join(c if c.isalnum() or c == " " else f"\\x{{{ord(c):x}}}" for c in text)


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    first = reason.strip().splitlines()[0][:300] if reason.strip() else "it cannot be compiled"
    return RequestError(
        f"the {constraint.kind} cannot be enforced: {first}", param=constraint.param, code="invalid_grammar"
    )

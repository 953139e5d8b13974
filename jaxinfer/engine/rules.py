"""Which tokens a sequence may generate next: logit_bias, allowed_token_ids, min_tokens, bad words, grammars. NumPy only."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from jaxinfer.engine.constraint import Matcher
from jaxinfer.engine.request import SamplingParams


class TokenRules:
    """Rules of one completion, as a bias to add to its logits that changes only when its state does.

    Attributes:
      needs_tokens: the state depends on generated tokens, so the host must have read them all before the next step.
    """

    def __init__(
        self, params: SamplingParams, end_ids: Set[int], vocab_size: int, matcher: Matcher | None = None
    ):
        """
        Args:
          end_ids: tokens that end this completion; forbidden until min_tokens are out.
          matcher: of params.constraint.
        """
        self.matcher = matcher
        self._vocab_size = vocab_size
        self._params = params
        self._min_tokens = params.min_tokens
        self._end_ids = sorted(i for i in end_ids if i < vocab_size)
        self._phrases = [word for word in params.bad_words_ids if len(word) > 1]
        self.needs_tokens = bool(self._phrases) or matcher is not None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters restrict tokens at all."""
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_ids
            or params.min_tokens
            or params.constraint is not None
        )

    def state(self, num_generated: int, generated: list[int]) -> tuple[bool, frozenset[int]]:
        """What the bias depends on, for the next token after `num_generated`; `generated` may lag unless needs_tokens."""
        banned = frozenset(w[-1] for w in self._phrases if tuple(generated[-len(w) + 1 :]) == w[:-1])
        return num_generated < self._min_tokens, banned

    def bias(self, state: tuple[bool, frozenset[int]]) -> np.ndarray:
        """The bias in this state, float32 [V]."""
        too_early, banned = state
        allowed = self._params.allowed_token_ids
        bias = np.zeros(self._vocab_size, np.float32)
        if allowed is not None:
            bias[:] = -np.inf
            bias[list(allowed)] = 0.0
        for token, value in (self._params.logit_bias or {}).items():
            bias[token] += value
        bias[[word[0] for word in self._params.bad_words_ids if len(word) == 1]] = -np.inf
        bias[list(banned)] = -np.inf
        if too_early:
            bias[self._end_ids] = -np.inf
        return bias


def uses_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def penalty_counts(tokens: list[int], num_prompt: int, vocab_size: int) -> np.ndarray:
    """SamplerState.counts of a sequence: 2 * (times generated) + (1 if it is in the prompt), int32 [V]."""
    counts = 2 * np.bincount(tokens[num_prompt:], minlength=vocab_size).astype(np.int32)
    counts[tokens[:num_prompt]] += 1 - counts[tokens[:num_prompt]] % 2
    return counts

"""A completion in the making: what each token does to its text, and when it ends. Pure Python."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from jaxinfer.engine.request import CompletionOutput, RequestOutput, SamplingParams, TokenLogprob
from jaxinfer.engine.rules import TokenRules
from jaxinfer.engine.sequence import Sequence
from jaxinfer.text.detokenizer import IncrementalDetokenizer


@dataclass(slots=True, eq=False)
class RequestState:
    """A request inside the engine: its sequences, one a completion, and the output that callers see grow."""

    output: RequestOutput
    params: SamplingParams
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0


@dataclass(slots=True, eq=False)
class Completion:
    """One completion of a request; the `request` field of its sequence.

    Attributes:
      end_ids: the model's own end-of-sequence ids, unless ignored.
      max_tokens: generated tokens at which it ends with reason "length".
      seed: of its draws.
      rules: restrictions on its tokens, if any; rules_state is the one the device has.
      slot: the slot that was prepared for it.
    """

    state: RequestState
    output: CompletionOutput
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    end_ids: Set[int]
    max_tokens: int
    seed: int
    rules: TokenRules | None = None
    rules_state: object = None
    slot: int = -1

    def append(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Takes the next token; True when it ends the completion. A negative token stands for logits without a choice."""
        out = self.output
        if token < 0:
            self.state.output.error = "the model's logits hold a NaN, or no token was allowed to follow"
            if self.rules is not None and self.rules.matcher is not None and self.rules.matcher.gave_up:
                self.state.output.error = "the grammar grew too complex to be followed: make it simpler"
            return self._end("error", None)
        out.token_ids.append(token)
        if logprob is not None and out.logprobs is not None:
            out.logprobs.append(logprob)
        ids = len(out.token_ids)
        if ids >= self.params.min_tokens:
            if token in self.end_ids:
                return self._end("stop", None, token)
            if token in self.params.stop_token_ids:
                return self._end("stop", token, token)
        if self.detokenizer is not None:
            out.text += self.detokenizer.append(token)
            if self.detokenizer.stopped is not None:
                return self._end("stop", self.detokenizer.stopped)
        if ids >= self.max_tokens:
            return self._end("length", None)
        return False

    def _end(self, reason: str, stop_reason: str | int | None, last: int | None = None) -> bool:
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason
        if self.detokenizer is not None:
            if last is not None and self.params.include_stop_str_in_output:
                self.output.text += self.detokenizer.append(last)
            self.output.text += self.detokenizer.finish()
        return True

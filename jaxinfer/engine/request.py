"""What a caller asks of the engine and what comes back. Pure Python: no JAX in here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxinfer.errors import RequestError

FinishReason = str  # "stop" | "length" | "abort" | "error"

_MAX_STOP_STRINGS = 16
_MAX_LOGPROBS = 20
_SEED_RANGE = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    Ranges follow vLLM's (see docs/sampling.md). Construction checks everything that can be checked
    without a model; `check_vocab` checks token ids against a vocabulary.

    Attributes:
      max_tokens: most tokens to generate (>= 1); None: up to the context limit.
      n: completions per prompt.
      temperature: 0 is greedy; else in (0, 2].
      top_p: keep the smallest set of tokens with this probability, in (0, 1].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      min_p: drop tokens less likely than min_p times the most likely, in [0, 1].
      presence_penalty, frequency_penalty: in [-2, 2], over generated tokens only (as OpenAI's).
      repetition_penalty: > 0; over prompt and generated tokens (as in CTRL, arXiv:1909.05858).
      logit_bias: added to the logits of these token ids.
      seed: same seed, prompt and parameters give the same tokens, whatever runs beside them.
      stop: a string or several that end the text; cut from it unless include_stop_str_in_output.
      stop_token_ids: token ids that end the text, beside the model's own end-of-sequence ids.
      ignore_eos: go on past the model's end-of-sequence ids.
      min_tokens: end-of-sequence and stop token ids are masked until this many tokens are out.
      logprobs: report the log-probability of each chosen token and this many of the most likely (0..20).
      prompt_logprobs: the same for every prompt token after the first; such a request reads no prefix cache.
      bad_words_ids: token sequences that must not be generated.
      allowed_token_ids: when given, nothing else is generated.
      skip_special_tokens: leave control tokens out of the text.
      include_stop_str_in_output: keep the stop string in the text.
    """

    max_tokens: int | None = 16
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_words_ids", tuple(tuple(w) for w in self.bad_words_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("n", self.n, 1, 1024)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, *_SEED_RANGE)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, _MAX_LOGPROBS)
        if len(self.stop) > _MAX_STOP_STRINGS:
            raise RequestError(
                f"at most {_MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop"
            )
        for s in self.stop:
            if not isinstance(s, str) or not s:
                raise RequestError(f"stop strings must be non-empty text, got {s!r}", param="stop")
        for i in self.stop_token_ids:
            _integer("stop_token_ids", i, 0)
        for key, value in (self.logit_bias or {}).items():
            _integer("logit_bias", key, 0)
            _number("logit_bias", value, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty; leave it out", param="allowed_token_ids")
        for word in self.bad_words_ids:
            if not word:
                raise RequestError("bad words must not be empty", param="bad_words")
        if self.temperature == 0 and self.n > 1:
            raise RequestError(
                f"n={self.n} needs sampling, but temperature is 0 (greedy): every completion would be the same; "
                "raise temperature or set n=1",
                param="n",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raises RequestError if any token id named here is outside [0, vocab_size)."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [i for word in self.bad_words_ids for i in word],
        }
        for param, ids in named.items():
            for i in ids:
                if not 0 <= i < vocab_size:
                    raise RequestError(
                        f"{param}: token id {i} is outside the vocabulary of {vocab_size}", param=param
                    )

    def replace(self, **changes) -> SamplingParams:
        return dataclasses.replace(self, **changes)


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one chosen token and, if asked, of the most likely ones at its place (natural log)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # (token id, logprob), best first


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a prompt. Grows while the request runs.

    `text` and `token_ids` hold everything so far; finish_reason is None until the end.
    stop_reason is the stop string or stop token id that ended it, None for the model's own end or a length stop.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """State of a request as the engine reports it after a step that changed it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one a prompt token; the first is None
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    finished: bool = False
    error: str | None = None  # why, when a finish_reason is "error"


def _number(name: str, value, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value < low or value > high or (open_low and value == low):
        upper = "" if high == math.inf else f", {high:g}]"
        wanted = (
            f"> {low:g}" if high == math.inf and open_low else f"in {'(' if open_low else '['}{low:g}{upper}"
        )
        raise RequestError(f"{name} must be {wanted}, got {value!r}", param=name)


def _integer(name: str, value, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {wanted}, got {value}", param=name)

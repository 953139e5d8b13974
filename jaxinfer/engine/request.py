"""What a caller asks of the engine and what comes back. Pure Python: no JAX in here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxinfer.errors import RequestError
from jaxinfer.values import as_integer, as_number, shown

FinishReason = str  # "stop" | "length" | "abort" | "error"

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROBS = 20
_INT64 = (-(2**63), 2**63 - 1)
_MAX_TOP_K = 2**31 - 1  # the device counts in 32 bits; no vocabulary is larger
_GREEDY_BELOW = 1e-5  # temperatures: vLLM's bounds
_MIN_TEMPERATURE = 0.01

# Field of SamplingParams: lowest and highest value. top_p is above its lowest.
INTEGER_LIMITS: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "n": (1, 1024),
    "top_k": (-1, None),
    "seed": _INT64,
    "min_tokens": (0, None),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
NUMBER_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
BIAS_LIMIT = 100.0  # of a logit
_BOOLEANS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
_MAX_GRAMMAR_CHARS = 2**18
_MAX_SCHEMA_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form that the generated text must have; each token is chosen among those that can still lead to it.

    Attributes:
      kind: "json_schema", "json_object" (any JSON object), "regex" (of the whole text), "choice" or "grammar".
      value: the schema as JSON text, the expression, a JSON array of the texts to choose among, or a grammar in Lark's or GBNF's
        notation; "" for json_object.
      param: the request field it came from, for error messages.
    """

    kind: ConstraintKind
    value: str = ""
    param: str = field(default="constraint", compare=False)

    def __post_init__(self) -> None:
        kinds = get_args(ConstraintKind)
        if self.kind not in kinds:
            raise RequestError(
                f"a constraint is one of {', '.join(kinds)}, got {shown(self.kind)}", param=self.param
            )
        if not isinstance(self.value, str):
            raise RequestError(f"a {self.kind} must be text, got {shown(self.value)}", param=self.param)
        _check_unicode(self.param, self.value)
        if self.kind == "json_object":
            return
        if not self.value.strip():
            raise RequestError(f"the {self.kind} is empty", param=self.param)
        if "\0" in self.value or "\\u0000" in self.value:
            raise RequestError(f"the {self.kind} must not hold NUL characters", param=self.param)
        if len(self.value) > _MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the {self.kind} has {len(self.value)} characters, the most allowed is {_MAX_GRAMMAR_CHARS}",
                param=self.param,
            )
        if self.kind in ("json_schema", "choice"):
            self._check_json()

    def _check_json(self) -> None:
        try:
            value = json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the {self.kind} is not JSON: {error}", param=self.param) from None
        if self.kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
                raise RequestError("choice must be a list of non-empty texts", param=self.param)
        elif not isinstance(value, dict | bool):
            raise RequestError(f"a JSON schema is an object, got {shown(value)}", param=self.param)
        if _depth(value) > _MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"the {self.kind} is nested more than {_MAX_SCHEMA_DEPTH} deep", param=self.param
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    Ranges follow vLLM's (see docs/sampling.md). Construction checks everything that can be checked
    without a model, and keeps Python's own numbers and tuples; `check_vocab` checks token ids against a vocabulary.

    Attributes:
      max_tokens: most tokens to generate (>= 1); None: up to the context limit.
      n: completions per prompt.
      temperature: 0 is greedy; else in (0, 2]. Below 1e-5 it becomes 0, else below 0.01 it becomes 0.01.
      top_p: keep the smallest set of tokens with this probability, in (0, 1].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      min_p: drop tokens less likely than min_p times the most likely, in [0, 1].
      presence_penalty, frequency_penalty: in [-2, 2], over generated tokens only (as OpenAI's).
      repetition_penalty: in [0.01, 100], 1 is off; over prompt and generated tokens (as in CTRL, arXiv:1909.05858).
      logit_bias: in [-100, 100], added to the logits of these token ids.
      seed: same seed, prompt and parameters give the same tokens, whatever runs beside them.
      stop: a string or several that end the text; cut from it unless include_stop_str_in_output.
      stop_token_ids: token ids that end the text, beside the model's own end-of-sequence ids.
      ignore_eos: go on past the model's end-of-sequence ids.
      min_tokens: end-of-sequence and stop token ids are masked until this many tokens are out.
      logprobs: report the log-probability of each chosen token and this many of the most likely (0..20).
      prompt_logprobs: the same for every prompt token after the first; such a request reads no prefix cache.
      bad_words: texts that must not be generated. The engine knows token ids alone: `LLM.generate`, `LLM.chat` and
        the protocol turn them into bad_words_ids (jaxinfer.protocol.text_params).
      bad_words_ids: the same as token sequences.
      allowed_token_ids: when given, nothing else is generated.
      constraint: a form the text must have (JSON, a grammar, ...); it cannot go with ignore_eos.
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
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, (low, high) in INTEGER_LIMITS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                keep(name, _integer(name, value, low, high))
        for name, (low, high) in NUMBER_LIMITS.items():
            keep(name, _number(name, getattr(self, name), low, high, open_low=name == "top_p"))
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be True or False, got {shown(getattr(self, name))}", param=name
                )
        keep("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        keep("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            keep("logit_bias", _biases(self.logit_bias))
        keep("bad_words", _texts("bad_words", self.bad_words))
        words = _members("bad_words_ids", self.bad_words_ids, "lists of token ids")
        keep("bad_words_ids", tuple(_ids("bad_words_ids", word) for word in words))
        if self.allowed_token_ids is not None:
            keep("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        self._check_together()

        keep("top_k", min(max(self.top_k, 0), _MAX_TOP_K))
        if self.seed == -1:
            keep("seed", None)
        if self.temperature < _GREEDY_BELOW:
            keep("temperature", 0.0)
        elif self.temperature < _MIN_TEMPERATURE:
            keep("temperature", _MIN_TEMPERATURE)

    def _check_together(self) -> None:
        if self.max_tokens is not None:
            _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop")
        if not all(self.stop):
            raise RequestError("stop strings must be non-empty text, got ''", param="stop")
        if not all(word.strip() for word in self.bad_words):
            raise RequestError("bad_words must not hold blank words", param="bad_words")
        if not all(self.bad_words_ids):
            raise RequestError("bad_words_ids must not hold empty words", param="bad_words_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty; leave it out", param="allowed_token_ids")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(
                f"constraint must be a Constraint or None, got {shown(self.constraint)}", param="constraint"
            )
        if self.constraint is not None and self.ignore_eos:
            raise RequestError(
                f"ignore_eos cannot go with {self.constraint.param}: the text ends where its form does",
                param="ignore_eos",
            )
        if self.temperature < _GREEDY_BELOW and self.n > 1:
            raise RequestError(
                f"n={self.n} needs sampling, but temperature is {self.temperature:g} (greedy): every completion would "
                "be the same; raise temperature or set n=1",
                param="n",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raises RequestError if any token id named here is outside [0, vocab_size), or bad_words are still text."""
        if self.bad_words:
            raise RequestError(
                "bad_words must be turned into token ids before the engine: give bad_words_ids",
                param="bad_words",
            )
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_ids": [i for word in self.bad_words_ids for i in word],
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
    started: float | None = None  # when the first step with its prompt was made, as time.perf_counter counts


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, and what it has done since it was made.

    Attributes:
      waiting, running: sequences by state.
      kv_usage: share of the KV pages that running sequences hold, 0 to 1.
      generated_tokens: handed out.
      prefilled_tokens: computed at once with others of their sequence, as prompts are.
      preemptions: times a running sequence lost its pages and had to wait again.
    """

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0


def token_ids(value: object, param: str = "prompt") -> list[int]:
    """A list of token ids as Python's integers, from any flat sequence or array of integers.

    Raises:
      RequestError: it is something else; `param` names it.
    """
    to_list = getattr(value, "tolist", None)
    items = value if to_list is None else to_list()
    if isinstance(items, str | bytes | Mapping | Set) or not isinstance(items, Iterable):
        raise RequestError(f"{param} must be a list of token ids, got {shown(value)}", param=param)
    ids = list(items)
    if set(map(type, ids)) <= {int}:  # nearly always, and faster than a look at each
        return ids
    return [_id(param, i) for i in ids]


def check_request(prompt_token_ids: object, priority: object, cache_salt: object) -> list[int]:
    """Checks what a request is made of beside its SamplingParams; returns the prompt as Python's integers.

    Raises:
      RequestError: a prompt that is no list of integers, a priority that is no 64-bit integer, or a cache_salt that is
        neither None nor a text of at least one character that UTF-8 can carry.
    """
    ids = token_ids(prompt_token_ids)
    _integer("priority", priority, *_INT64)
    if cache_salt is not None:
        if not isinstance(cache_salt, str) or not cache_salt:
            raise RequestError(
                f"cache_salt must be a non-empty text or None, got {shown(cache_salt)}", param="cache_salt"
            )
        _check_unicode("cache_salt", cache_salt)
    return ids


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    number = as_number(value)
    if number is None:
        raise RequestError(f"{name} must be a finite number, got {shown(value)}", param=name)
    if number < low or number > high or (open_low and number == low):
        wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise RequestError(f"{name} must be {wanted}, got {shown(value)}", param=name)
    return number


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    number = as_integer(value)
    if number is None:
        raise RequestError(f"{name} must be an integer, got {shown(value)}", param=name)
    if number < low or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {wanted}, got {shown(value)}", param=name)
    return number


def _id(name: str, value: object) -> int:
    number = as_integer(value)
    if number is None:
        raise RequestError(f"{name} must hold token ids (integers), got {shown(value)}", param=name)
    return number


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = tuple(_id(name, i) for i in _members(name, value, "a list of token ids"))
    if ids and min(ids) < 0:
        raise RequestError(f"{name} must hold token ids of at least 0, got {min(ids)}", param=name)
    return ids


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = _members(name, value, "a list of texts")
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name} must hold texts, got {shown(text)}", param=name)
        _check_unicode(name, text)
    return texts


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers, got {shown(value)}", param="logit_bias"
        )
    _ids("logit_bias", value.keys())
    return {
        _id("logit_bias", i): _number("logit_bias", bias, -BIAS_LIMIT, BIAS_LIMIT)
        for i, bias in value.items()
    }


def _members(name: str, value: object, wanted: str) -> tuple[Any, ...]:
    """The members of a list or of anything that can be gone through like one; None is empty."""
    if value is None:
        return ()
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable):
        try:
            return tuple(value)
        except TypeError:  # an array without dimensions
            pass
    raise RequestError(f"{name} must be {wanted}, got {shown(value)}", param=name)


def _depth(value: Any) -> int:
    """How deeply lists and objects nest; without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth)
            left += [(child, depth + 1) for child in (item.values() if isinstance(item, dict) else item)]
    return deepest


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} holds half of a surrogate pair, which is no character: {shown(text)}", param=name
        ) from None

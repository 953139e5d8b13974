"""Sampling fields of a request body → SamplingParams. Types are checked here, ranges by SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.engine.request import SamplingParams
from jaxinfer.protocol.constraints import read_constraint
from jaxinfer.protocol.request import Endpoint
from jaxinfer.protocol.strict_json import Fields

SAMPLING_FIELDS = frozenset(
    [
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "bad_words",
        "allowed_token_ids",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "response_format",
        "structured_outputs",
    ]
)
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OPENAI_COMPLETION_TOKENS = 16


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults a model's generation_config.json sets, as request fields (`max_new_tokens` → `max_tokens`). Its own results stay as they are."""
    defaults = {name: generation_config.get(name) for name in _MODEL_DEFAULTS}
    defaults["max_tokens"] = generation_config.get("max_new_tokens", generation_config.get("max_tokens"))
    return {name: value for name, value in defaults.items() if value is not None}


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The body with defaults where it is silent; null counts as silence."""
    given = {name: value for name, value in body.items() if value is not None}
    merged = {**defaults, **given}
    if "max_tokens" not in given and "max_completion_tokens" in given:
        merged.pop("max_tokens", None)
    return merged


def read_sampling(fields: Fields, endpoint: Endpoint, *, echo: bool = False) -> SamplingParams:
    """Builds SamplingParams from a body to which defaults were already applied.

    OpenAI's defaults fill the rest: temperature and top_p 1; max_tokens 16 for completions, up to the context for
    chat. With `echo` and logprobs the prompt's log-probabilities are computed too.

    Raises:
      RequestError: naming the field.
    """
    limit = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    max_tokens = fields.integer(limit, None if endpoint == "chat" else _OPENAI_COMPLETION_TOKENS)
    if max_tokens is not None and max_tokens < 1:
        raise fields.error(limit, f"must be at least 1, got {max_tokens}")
    min_tokens = fields.integer("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.error("min_tokens", f"must be at most {limit}={max_tokens}, got {min_tokens}")

    logprobs = _chat_logprobs(fields) if endpoint == "chat" else fields.integer("logprobs")
    prompt_logprobs = fields.integer("prompt_logprobs")
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=fields.integer("n", 1),
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k", 0),
        min_p=fields.number("min_p", 0.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=fields.integer_map("logit_bias"),
        seed=fields.integer("seed"),
        stop=fields.strings("stop", lone=True),
        stop_token_ids=fields.integers("stop_token_ids") or (),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=fields.strings("bad_words"),
        allowed_token_ids=fields.integers("allowed_token_ids"),
        constraint=read_constraint(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    """Chat asks with a boolean and a count: `logprobs: true, top_logprobs: 5`."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0)
    if top and not wanted:
        raise fields.error("top_logprobs", "needs logprobs: true")
    if not 0 <= top <= 20:
        raise fields.error("top_logprobs", f"must be between 0 and 20, got {top}")
    return top if wanted else None

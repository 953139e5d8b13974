"""Sampling fields of a request body → SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.engine.request import SamplingParams
from jaxinfer.protocol.constraints import read_constraint
from jaxinfer.protocol.convert import wrong
from jaxinfer.protocol.types import ChatFields, CompletionBody, SamplingFields

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


def read_sampling(fields: ChatFields | CompletionBody, body: Mapping[str, Any]) -> SamplingParams:
    """Builds SamplingParams from a body to which defaults were already applied.

    OpenAI's defaults are SamplingParams' own but for max_tokens of a chat: up to the context. With `echo` and logprobs the prompt's
    log-probabilities are computed too.

    Args:
      body: what `fields` were read from.

    Raises:
      RequestError: naming the field.
    """
    given = {
        name: value
        for name in SamplingFields.__struct_fields__
        if (value := getattr(fields, name)) is not None
    }
    if fields.logit_bias is not None:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in fields.logit_bias.items()}

    limit, max_tokens = "max_completion_tokens", fields.max_completion_tokens
    if max_tokens is None:
        limit, max_tokens = "max_tokens", fields.max_tokens
    if max_tokens is None and isinstance(fields, CompletionBody):
        max_tokens = _OPENAI_COMPLETION_TOKENS
    if max_tokens is not None and fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise wrong("min_tokens", f"must be at most {limit}={max_tokens}, got {fields.min_tokens}")

    if isinstance(fields, CompletionBody):
        logprobs = fields.logprobs
        if fields.echo and logprobs is not None:
            given["prompt_logprobs"] = max(logprobs, fields.prompt_logprobs or 0)
    else:
        logprobs = _chat_logprobs(fields)
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, constraint=read_constraint(fields, body), **given
    )


def _chat_logprobs(fields: ChatFields) -> int | None:
    """Chat asks with a boolean and a count: `logprobs: true, top_logprobs: 5`."""
    top = fields.top_logprobs or 0
    if top and not fields.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    return top if fields.logprobs else None

"""A validated generation request, whichever endpoint, batch line or command it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.engine.request import SamplingParams
from jaxinfer.protocol.tools import Tools

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to be rendered with the model's chat template.

    Attributes:
      messages: as sent, types checked; contents may be text, null or a list of text parts.
      add_generation_prompt: end with the opening of an assistant turn.
      continue_final_message: leave the last turn open, for the model to go on with it.
      tools: functions that the answer may call, None for none.
      template_kwargs: further variables for the template, such as enable_thinking.
    """

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one request asks for. Exactly one of `prompts` and `chat` is given.

    Attributes:
      prompts: texts or token ids, one engine request each ("completions").
      chat: the conversation ("chat").
      sampling: checked but for what needs the model: see jaxinfer.protocol.prompt.prepare.
      add_special_tokens: let the tokenizer add its own BOS to text prompts.
      echo: put the prompt before the completion, in text and logprobs.
      stream, include_usage, continuous_usage_stats: the shape of the answer, for the server.
      prompt_logprobs: the response shows them (echo computes them for its own shape).
      return_token_ids: add prompt and completion token ids to the response.
      model: the name that was asked for; the caller decides what it serves.
      priority: lower runs first.
      cache_salt: requests with different salts never share prefix cache.
    """

    endpoint: Endpoint
    sampling: SamplingParams
    prompts: tuple[str | tuple[int, ...], ...] = ()
    chat: ChatPrompt | None = None
    add_special_tokens: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    model: str | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str | None = None

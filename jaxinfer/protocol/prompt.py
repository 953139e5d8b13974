"""From a validated request to what the engine takes: token ids that fit, and sampling that fits the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.request import SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.protocol.request import ChatPrompt, GenerationRequest
from jaxinfer.protocol.text_params import tokenize_params
from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine; `text` is what the client sent, None when it sent token ids or a chat."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for the engine: one engine request a prompt, all with `params`."""

    request: GenerationRequest
    prompts: tuple[Prompt, ...]
    params: SamplingParams


def prepare(
    request: GenerationRequest,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    *,
    max_model_len: int,
    vocab_size: int,
    safe: bool = False,
) -> PreparedRequest:
    """Tokenises and checks a request against the model.

    Args:
      tokenizer: None for a model that has none: then the prompts must be token ids, and nothing may ask for text.
      max_model_len: prompt and generation together, tokens; a prompt of P tokens fits when P + 1 <= max_model_len.
      safe: text of users, tools and documents in a chat never becomes a control token; off by default, as elsewhere.

    Raises:
      RequestError: an empty or too long prompt (code "context_length_exceeded"), a token id outside the vocabulary,
        no tokenizer or chat template where one is needed, or the template's own refusal.
    """
    params = tokenize_params(request.sampling, tokenizer)
    params.check_vocab(vocab_size)
    if request.echo and tokenizer is None:
        raise RequestError(
            "echo needs a tokenizer, and this model has none: remove it, or ask for prompt_logprobs",
            param="echo",
        )
    if request.chat is not None:
        prompts = (Prompt(_chat_ids(request.chat, tokenizer, template, safe)),)
    else:
        prompts = tuple(
            Prompt(encode_text(p, tokenizer, add_special_tokens=request.add_special_tokens), p)
            if isinstance(p, str)
            else Prompt(list(p))
            for p in request.prompts
        )
    field = "messages" if request.chat is not None else "prompt"
    for prompt in prompts:
        _check_ids(prompt.token_ids, field, params, max_model_len, vocab_size)
    return PreparedRequest(request, prompts, params)


def encode_text(text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt. Raises RequestError when there is no tokenizer."""
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer: give token ids instead of text, such as [1, 2, 3]", param="prompt"
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _chat_ids(
    chat: ChatPrompt, tokenizer: Tokenizer | None, template: ChatTemplate | None, safe: bool
) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer, so it cannot chat: give token ids as prompt", param="messages"
        )
    if template is None:
        raise RequestError(
            "this model has no chat template: send a prompt to /v1/completions instead", param="messages"
        )
    return encode_chat(
        tokenizer,
        template,
        list(chat.messages),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=None,
        template_kwargs=dict(chat.template_kwargs),
        safe=safe,
    )


def _check_ids(
    ids: list[int], field: str, params: SamplingParams, max_model_len: int, vocab_size: int
) -> None:
    if not ids:
        raise RequestError(
            f"{field} has no tokens, and this model adds no BOS: send at least one token", param=field
        )
    if len(ids) + 1 > max_model_len:
        wanted = "no limit" if params.max_tokens is None else f"{params.max_tokens} tokens"
        raise RequestError(
            f"the prompt has {len(ids)} tokens (generation requested: {wanted}), but the context is limited to "
            f"{max_model_len} tokens, at least one of them generated: shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )
    for i in ids:
        if not 0 <= i < vocab_size:
            raise RequestError(
                f"{field}: token id {i} is outside the vocabulary of {vocab_size}", param=field
            )

"""From a validated request to what the engine takes: token ids that fit, and sampling that fits the vocabulary."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.engine.request import SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.protocol.images import ImageOptions, fetch_all, image_urls, put_images, with_places
from jaxinfer.protocol.request import ChatPrompt, GenerationRequest
from jaxinfer.protocol.text_params import tokenize_params
from jaxinfer.protocol.tools import FORCED_PARSER, Tools
from jaxinfer.text.chat import ChatTemplate, check_text_fits, encode_chat
from jaxinfer.text.parsers import (
    REASONING_END,
    TOOL_PARSERS,
    OutputParser,
    guess_reasoning_parser,
    guess_tool_parser,
    make_output_parser,
)
from jaxinfer.text.tokenizer import Tokenizer

_PROMPT_END = 64  # tokens, enough to see whether the template has opened the reasoning


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine.

    Attributes:
      text: what the client sent, None when it sent token ids or a chat.
      media: images, in the order of their placeholders.
    """

    token_ids: list[int]
    text: str | None = None
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for the engine: one engine request a prompt, all with `params`."""

    request: GenerationRequest
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    parsing: Parsing | None = None


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the text of a chat answer is read: see jaxinfer.text.parsers.make_output_parser."""

    tool_parser: str | None
    reasoning_parser: str | None
    prompt_end: str
    tools: Tools | None

    def parser(self) -> OutputParser:
        """A new one, for one completion."""
        return make_output_parser(self.tool_parser, self.reasoning_parser, prompt=self.prompt_end)

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        return reason if self.tools is None else self.tools.finish_reason(reason, num_calls)


def prepare(
    request: GenerationRequest,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    *,
    max_model_len: int,
    vocab_size: int,
    safe: bool = False,
    tool_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    images: ImageOptions | None = None,
    files: Sequence[bytes] | None = None,
) -> PreparedRequest:
    """Tokenises and checks a request against the model.

    Args:
      tokenizer: None for a model that has none: then the prompts must be token ids, and nothing may ask for text.
      max_model_len: prompt and generation together, tokens; a prompt of P tokens fits when P + 1 <= max_model_len.
      safe: text of users, tools and documents in a chat never becomes a control token; off by default, as elsewhere.
      tool_parser, reasoning_parser: how chat answers are read: a name in jaxinfer.text.parsers, "auto" for what the chat
        template speaks for, or None to take everything as content.

    Raises:
      RequestError: an empty or too long prompt (code "context_length_exceeded"), a token id outside the vocabulary,
        no tokenizer or chat template where one is needed, or the template's own refusal.
    """
    params = tokenize_params(request.sampling, tokenizer)
    parsing = None
    if request.chat is not None and template is not None:
        params, parsing = _parsing(request.chat.tools, params, template, tool_parser, reasoning_parser)
    params.check_vocab(vocab_size)
    if request.echo and tokenizer is None:
        raise RequestError(
            "echo needs a tokenizer, and this model has none: remove it, or ask for prompt_logprobs",
            param="echo",
        )
    if request.chat is not None:
        options = images or ImageOptions()
        urls = image_urls(request.chat.messages, options)
        if urls and files is None:
            files = asyncio.run(fetch_all(urls, options.policy))
        token_ids, media = _chat_ids(request.chat, tokenizer, template, safe, max_model_len), ()
        if urls:
            assert tokenizer is not None  # _chat_ids has refused it
            token_ids, media = put_images(token_ids, files or (), tokenizer, options)
        prompts = (Prompt(token_ids, media=media),)
    else:
        prompts = tuple(
            Prompt(
                encode_text(
                    p, tokenizer, add_special_tokens=request.add_special_tokens, max_tokens=max_model_len
                ),
                p,
            )
            if isinstance(p, str)
            else Prompt(list(p))
            for p in request.prompts
        )
    field = "messages" if request.chat is not None else "prompt"
    for prompt in prompts:
        _check_ids(prompt.token_ids, field, params, max_model_len, vocab_size)
    if parsing is not None and parsing.reasoning_parser is not None and tokenizer is not None:
        if not tokenizer.special_ids.isdisjoint(tokenizer.encode(REASONING_END, add_special_tokens=False)):
            params = params.replace(skip_special_tokens=False)  # the tags are control tokens
        continued = request.chat is not None and request.chat.continue_final_message
        ids = prompts[0].token_ids if continued else prompts[0].token_ids[-_PROMPT_END:]
        end = tokenizer.decode(ids, skip_special_tokens=False)
        parsing = dataclasses.replace(parsing, prompt_end=end)
    return PreparedRequest(request, prompts, params, parsing)


def _parsing(
    tools: Tools | None,
    params: SamplingParams,
    template: ChatTemplate,
    tool_parser: str | None,
    reasoning_parser: str | None,
) -> tuple[SamplingParams, Parsing | None]:
    """How the answer is read, and the parameters that see to it that it can be."""
    source = "\n".join(template.sources.values())
    if reasoning_parser == "auto":
        reasoning_parser = guess_reasoning_parser(source)
    if tools is None:
        tool_parser = None
    elif tools.forced:
        if params.constraint is not None:
            raise RequestError(
                f"{params.constraint.param} cannot go with a tool_choice that forces a call",
                param="tool_choice",
            )
        tool_parser, reasoning_parser = FORCED_PARSER, None
        params = params.replace(constraint=tools.constraint())
    else:
        if tool_parser == "auto":
            tool_parser = guess_tool_parser(source)
        if tool_parser is None:
            raise RequestError(
                "this model's chat template knows no tools: leave tools out, or set tool_choice to required",
                param="tools",
            )
        if TOOL_PARSERS[tool_parser].needs_special_tokens:
            params = params.replace(skip_special_tokens=False)
    if tool_parser is None and reasoning_parser is None:
        return params, None
    return params, Parsing(tool_parser, reasoning_parser, "", tools)


def encode_text(
    text: str,
    tokenizer: Tokenizer | None,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    field: str = "prompt",
) -> list[int]:
    """Token ids of a prompt. Raises RequestError when there is no tokenizer, or the text cannot be so few tokens."""
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer: give token ids instead of text, such as [1, 2, 3]", param="prompt"
        )
    if max_tokens is not None:
        check_text_fits(text, tokenizer, max_tokens, field)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _chat_ids(
    chat: ChatPrompt,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    safe: bool,
    max_model_len: int,
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
        with_places(chat.messages),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=None if chat.tools is None else list(chat.tools.functions),
        template_kwargs=dict(chat.template_kwargs),
        safe=safe,
        max_tokens=max_model_len,
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

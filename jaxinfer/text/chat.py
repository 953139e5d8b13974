"""Chat messages to a prompt: the model's own Jinja template, rendered safely, then tokenized.

By default text in messages that spells a control token becomes that token, as in other servers. With
`safe=True` text from users, tools and documents never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from jaxinfer.errors import CheckpointError, RequestError
from jaxinfer.text import kimi_tools
from jaxinfer.text.jinja import ChatEnvironment
from jaxinfer.text.messages import normalize, refuse, with_text_arguments
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.untrusted import encode_marked, mark_untrusted, unused_character

_DEFAULT_MAX_CHARS = 32 * 2**20
_DEFAULT_MAX_SECONDS = 5.0
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
    )
)


class ChatTemplate:
    """A compiled chat template. Safe to share between threads.

    Args:
      source: Jinja source, or named sources: "default" and perhaps "tool_use" for requests with tools.
      special_tokens: "bos_token" → spelling and so on, given to the template as variables.
      max_chars: longest prompt it may write, characters.
      max_seconds: longest it may take.

    Raises CheckpointError if the source is not a Jinja template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        max_chars: int = _DEFAULT_MAX_CHARS,
        max_seconds: float = _DEFAULT_MAX_SECONDS,
    ):
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})
        self.max_chars = max_chars
        self.max_seconds = max_seconds
        self._environment = ChatEnvironment(max_chars)
        self._templates: dict[str, jinja2.Template] = {}
        for name, text in self.sources.items():
            try:
                self._templates[name] = self._environment.from_string(text)
            except jinja2.TemplateError as error:
                raise CheckpointError(f"chat template {name!r} is not valid Jinja: {error}") from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template that came with a tokenizer, None if it has none."""
        known = {
            name: tokenizer.chat_templates[name]
            for name in ("default", "tool_use")
            if name in tokenizer.chat_templates
        }
        return cls(known, special_tokens=tokenizer.special_tokens) if "default" in known else None

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        documents: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Args:
          messages: as in OpenAI's API; see `messages.normalize` for what is accepted.
          add_generation_prompt: end with the opening of an assistant turn.
          continue_final_message: end with the text of the last message, which must be the assistant's, and
            nothing after it, so that the model goes on with it; overrides add_generation_prompt.
          tools, documents: lists, given to the template as they are.
          template_kwargs: more variables for the template, such as enable_thinking.

        Raises RequestError (param "messages") with the template's own words when it refuses the messages.
        """
        for param, value in (("tools", tools), ("documents", documents)):
            if value is not None and not isinstance(value, list | tuple):
                raise RequestError(f"{param} must be a list, got {type(value).__name__}", param=param)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        chat = normalize(messages, self.sources[name])
        kwargs = dict(template_kwargs or {})
        shadowed = sorted(kwargs.keys() & (_RESERVED | self.special_tokens.keys()))
        if shadowed:
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(shadowed)}", param="chat_template_kwargs"
            )
        end_mark = ""
        if continue_final_message:
            if chat[-1]["role"] != "assistant":
                refuse(
                    f"continue_final_message needs a last message from the assistant, not {chat[-1]['role']!r}"
                )
            end_mark = unused_character(self.sources[name], chat, tools, documents, kwargs)
            if not isinstance(chat[-1]["content"], str):
                refuse("continue_final_message cannot go on after an image")
            chat[-1]["content"] += end_mark
        variables = {
            **kwargs,
            **self.special_tokens,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._run(name, variables, chat)
        if not end_mark:
            return text
        prompt, found, _ = text.rpartition(end_mark)
        if not found:
            refuse("the chat template leaves the last message out, so it cannot be continued")
        return prompt

    def _run(self, name: str, variables: Mapping[str, Any], chat: list[dict[str, Any]]) -> str:
        try:
            return self._write(name, {**variables, "messages": chat})
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            refuse(error.message or type(error).__name__)
        except Exception as error:
            # Some templates join the arguments of a tool call to text, and so need them as text.
            if isinstance(error, TypeError) and any("tool_calls" in turn for turn in chat):
                text_chat = with_text_arguments(chat)
                if text_chat != chat:
                    return self._run(name, variables, text_chat)
            refuse(f"the chat template cannot render these messages: {type(error).__name__}: {error}")

    def _write(self, name: str, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        with self._environment.budget(self.max_seconds):
            for part in self._templates[name].generate(variables):
                parts.append(part)
                size += len(part)
                if size > self.max_chars:
                    refuse(f"the chat template writes more than {self.max_chars} characters")
        return "".join(parts)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Any,
    *,
    safe: bool = False,
    tools: Any = None,
    documents: Any = None,
    max_tokens: int | None = None,
    **options: Any,
) -> list[int]:
    """Token ids of a chat prompt; the template writes BOS itself, and one is kept if it writes several.

    Args:
      safe: text of users, tools and documents, and tool definitions, never becomes a control token. What
        the system, developer and assistant messages spell still does. The result is the same as without
        it when no such text spells (part of) one.
      max_tokens: as `check_text_fits` has it; None for no limit.
      options: the other arguments of `ChatTemplate.render`.
    """
    mark = declared = ""
    if tokenizer.kimi_tools and isinstance(tools, list | tuple):
        tools = kimi_tools.sort_keys(tools)
        declared = kimi_tools.declare(tools)
    if safe:
        mark = unused_character(list(template.sources.values()), messages, tools, documents, options)
        messages, tools, documents, declared = mark_untrusted(
            tokenizer, mark, messages, tools, documents, declared
        )
    if declared:
        options["template_kwargs"] = {**(options.get("template_kwargs") or {}), "tools_ts_str": declared}
    text = template.render(messages, tools=tools, documents=documents, **options)
    if max_tokens is not None:
        check_text_fits(text, tokenizer, max_tokens, "messages")
    if mark and mark in text:
        return tokenizer.drop_double_bos(encode_marked(tokenizer, text, mark))
    return tokenizer.drop_double_bos(tokenizer.encode(text, add_special_tokens=False))


def check_text_fits(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """Refuses a text so long that even the longest token, again and again, spells it in more than `max_tokens`: tokenising
    takes some hundred times a text's memory, which would be for nothing.

    Raises:
      RequestError: code "context_length_exceeded".
    """
    if len(text) > max_tokens * tokenizer.longest_token:
        raise RequestError(
            f"{param} has {len(text)} characters, which are more than the {max_tokens} tokens that the context is limited to: "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )

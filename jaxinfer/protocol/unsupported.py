"""Request fields that would change the output and that nothing here can honour yet: refused, never ignored."""

from __future__ import annotations

from typing import Any

from jaxinfer.protocol.strict_json import Fields

# Field → values that ask for nothing, and so pass.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # tools as they were asked for before `tools`
    "functions": (),
    "function_call": ("none",),
    # grammars, in the dialects of SGLang and llama.cpp: response_format and structured_outputs are those that are known
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    # other ways of choosing tokens
    "stop_regex": (),
    "use_beam_search": (False,),
    "logits_processors": (),
    "custom_logit_processor": (),
    "logprob_token_ids": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "vllm_xargs": (),
    # other inputs and outputs
    "suffix": ("",),
    "prompt_embeds": (),
    "documents": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "verbosity": ("medium",),
    "return_tokens_as_token_ids": (False,),
}


def refuse_unsupported(fields: Fields) -> None:
    """Raises RequestError for the first field that asks for something not supported."""
    for name, value in fields.members.items():
        if value is None:
            continue
        if (name in _NEUTRAL and value not in _NEUTRAL[name]) or name.startswith("guided_"):
            raise fields.error(name, "is not supported yet: remove it", code="unsupported_parameter")
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != fields.integer("n", 1):
        raise fields.error("best_of", "other than n is not supported: set n", code="unsupported_parameter")

"""Request fields that would change the output and that nothing here can honour yet: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.protocol.convert import wrong

Neutral = Mapping[str, tuple[Any, ...]]

# Field → values beside null that ask for nothing, and so pass.
COMPLETIONS: Neutral = {
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
CHAT: Neutral = {**COMPLETIONS, "echo": (False,)}
RESPONSES: Neutral = {
    # this server stores nothing
    "previous_response_id": ("",),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "include": ([],),
    "top_logprobs": (0,),
}
EMBEDDINGS: Neutral = {"dimensions": ()}
BATCHES: Neutral = {"output_expires_after": ()}
_GUIDED = "guided_"  # vLLM's grammars of old; refused everywhere


def refuse_unsupported(body: Mapping[str, Any], neutral: Neutral) -> None:
    """Raises RequestError for the first field that asks for something not supported."""
    for name, value in body.items():
        if value is None:
            continue
        others = neutral.get(name)
        if others is None:
            refused = name.startswith(_GUIDED)
        else:
            refused = not any(type(value) is type(other) and value == other for other in others)
        if refused:
            raise wrong(name, "is not supported: remove it", code="unsupported_parameter")


def unsupported_schema(neutral: Neutral) -> dict[str, Any]:
    """The JSON schema that says the same."""
    shown = {
        name: {"enum": [None, *values], "description": "Not supported."} for name, values in neutral.items()
    }
    return {"properties": shown, "patternProperties": {f"^{_GUIDED}": {"type": "null"}}}

"""Token counts of an answer, in the spellings of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.request import CompletionOutput, RequestOutput
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.text.tokenizer import Tokenizer


def usage(
    outputs: Sequence[RequestOutput],
    prepared: PreparedRequest | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """Counts over all prompts and completions; a prompt counts once, whatever n.

    prepared, tokenizer: of a chat; then the tokens that its model thought with are told apart, if a parser knows them.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completions = [completion for output in outputs for completion in output.outputs]
    generated = sum(len(completion.token_ids) for completion in completions)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }
    if prepared is not None and tokenizer is not None and _thinks(prepared):
        thought = sum(reasoning_tokens(prepared, completion, tokenizer) for completion in completions)
        counts["completion_tokens_details"] = {"reasoning_tokens": thought}
    return counts


def response_usage(output: RequestOutput, prepared: PreparedRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same for /v1/responses."""
    [completion] = output.outputs
    prompt, generated = len(output.prompt_token_ids), len(completion.token_ids)
    thought = reasoning_tokens(prepared, completion, tokenizer) if _thinks(prepared) else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + generated,
    }


def reasoning_tokens(prepared: PreparedRequest, completion: CompletionOutput, tokenizer: Tokenizer) -> int:
    """Tokens up to the end of what the parser takes for reasoning; the tag that closes it is not counted."""
    assert prepared.parsing is not None
    parser = prepared.parsing.parser()
    deltas = parser.push(completion.text) + parser.finish()
    thought = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    if not thought:
        return 0
    end = completion.text.find(thought) + len(thought)
    left = len(completion.text[:end].encode())
    for count, token in enumerate(completion.token_ids):
        if left <= 0:
            return count
        left -= len(tokenizer.token_bytes(token))
    return len(completion.token_ids)


def _thinks(prepared: PreparedRequest) -> bool:
    return prepared.parsing is not None and prepared.parsing.reasoning_parser is not None

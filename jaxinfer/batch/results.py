"""Result lines of a batch; jaxinfer.batch describes them. `id` is always the first member: a later run reads it."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.batch.lines import BatchLine
from jaxinfer.engine.request import RequestOutput
from jaxinfer.protocol.errors import error_body
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.response import chat_completion, completion_choice, text_completion
from jaxinfer.protocol.usage import usage
from jaxinfer.text.tokenizer import Tokenizer


def answer(
    line: BatchLine,
    prepared: PreparedRequest,
    outputs: list[RequestOutput],
    tokenizer: Tokenizer | None,
    *,
    model: str,
    created: int,
) -> dict[str, Any]:
    """The result of a line that was answered. `created`: seconds since 1970, in OpenAI's form only."""
    if not line.openai:
        return {
            "id": line.id,
            "line": line.number,
            **_custom_id(line),
            **plain_answer(prepared, outputs[0], tokenizer),
        }
    suffix = line.id.removeprefix("batch_req_")
    if prepared.request.endpoint == "chat":
        assert tokenizer is not None  # prepare has refused it
        body = chat_completion(
            prepared, outputs[0], tokenizer, response_id=f"chatcmpl-{suffix}", created=created, model=model
        )
    else:
        body = text_completion(
            prepared, outputs, tokenizer, response_id=f"cmpl-{suffix}", created=created, model=model
        )
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{suffix}", "body": body},
        "error": None,
    }


def plain_answer(
    prepared: PreparedRequest, output: RequestOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The plain form of one prompt's completions, without the members that name the line."""
    completions = []
    for completion in output.outputs:
        choice = completion_choice(
            prepared, prepared.prompts[0], output, completion, tokenizer, index=completion.index
        )
        plain = {
            "text": choice["text"],
            "token_ids": completion.token_ids,
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        completions.append(
            plain | {k: choice[k] for k in ("logprobs", "prompt_logprobs") if choice.get(k) is not None}
        )
    counts = usage([output])
    del counts[
        "prompt_tokens_details"
    ]  # depends on what ran before, so it would differ when a run is resumed
    several = {"completions": completions} if prepared.params.n > 1 else {}
    return {**completions[0], **several, "usage": counts, "error": None}


def failure(line: BatchLine, error: dict[str, Any], *, status: int | None) -> dict[str, Any]:
    """The result of a line that was not answered.

    Args:
      error: OpenAI's error object.
      status: the HTTP status that a server would give, None when the line is at fault around its body.
    """
    result: dict[str, Any] = {"id": line.id, "line": line.number, "custom_id": line.custom_id}
    if line.openai:
        request_id = f"req_{line.id.removeprefix('batch_req_')}"
        result["response"] = status and {
            "status_code": status,
            "request_id": request_id,
            "body": error_body(error),
        }
    return {**result, "error": error}


def encode(result: dict[str, Any]) -> bytes:
    """One line of JSON, with its line end."""
    return json.dumps(result, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def is_failure(record: bytes) -> bool:
    return json.loads(record)["error"] is not None


def _custom_id(line: BatchLine) -> dict[str, Any]:
    return {} if line.custom_id is None else {"custom_id": line.custom_id}

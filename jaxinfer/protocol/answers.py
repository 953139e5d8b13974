"""Bodies of responses, for /openapi.json. Answers are built as plain objects where they are made; tests hold them to these types.

A field that is Unset here is left out where it does not apply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

_Count = Annotated[int, Meta(ge=0)]
_Time = Annotated[int, Meta(description="seconds since 1970")]
_FinishReason = Literal["stop", "length", "tool_calls"]


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class Error(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Answer):
    """What every failure is answered with."""

    error: Error


# Completions


class PromptTokensDetails(_Answer):
    cached_tokens: _Count


class CompletionTokensDetails(_Answer):
    reasoning_tokens: _Count


class Usage(_Answer):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(_Answer):
    logprob: float
    rank: int | None
    decoded_token: str


_PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatLogprob]


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[_Count]


class CalledFunction(_Answer):
    name: str
    arguments: Annotated[str, Meta(description="JSON")]


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Answer):
    index: _Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: _Time
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(_Answer):
    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason
    stop_reason: str | int | None
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: _Time
    model: str
    choices: list[CompletionChoice]
    usage: Usage


# Their streams: the data of one event


class ToolCallDelta(ToolCall):
    index: _Count


class ChatDelta(_Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_Answer):
    index: _Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: _Time
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class CompletionChunkChoice(_Answer):
    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(_Answer):
    id: str
    object: Literal["text_completion"]
    created: _Time
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET


# Responses


class ResponseUsage(_Answer):
    input_tokens: _Count
    input_tokens_details: PromptTokensDetails
    output_tokens: _Count
    output_tokens_details: CompletionTokensDetails
    total_tokens: _Count


class OutputText(_Answer, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(_Answer, tag_field="type", tag="reasoning_text"):
    text: str


_Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_Answer, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: _Status
    content: list[OutputText]


class OutputReasoning(_Answer, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    status: _Status
    content: list[ReasoningText]


class OutputCall(_Answer, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: _Status


class ResponseError(_Answer):
    code: str
    message: str


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens"]


class Response(_Answer):
    id: str
    object: Literal["response"]
    created_at: _Time
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    temperature: float
    top_p: float
    max_output_tokens: int | None
    instructions: str | None
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    user: str | None
    metadata: dict[str, Any]


class ResponseEvent(_Answer):
    """Data of one event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: _Count
    response: Response | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: _Count | UnsetType = UNSET
    content_index: _Count | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


# Embeddings


class Embedding(_Answer):
    object: Literal["embedding"]
    index: _Count
    embedding: Annotated[list[float] | str, Meta(description="numbers, or base64 of little-endian float32")]


class EmbeddingUsage(_Answer):
    prompt_tokens: _Count
    total_tokens: _Count


class Embeddings(_Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# The server and its model


class Status(_Answer):
    status: str


class Version(_Answer):
    version: str


class Model(msgspec.Struct, kw_only=True):
    """The served model; its facts (architecture, parameters, dtype and the like) stand beside these."""

    id: str
    object: Literal["model"]
    created: _Time
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(_Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    count: _Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(_Answer):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Control tokens by name stand beside these."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | UnsetType = UNSET


# Files and batches


class File(_Answer):
    id: str
    object: Literal["file"]
    bytes: _Count
    created_at: _Time
    filename: str
    purpose: Literal["batch", "batch_output", "user_data"]
    status: Literal["processed"]


class DeletedFile(_Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class Files(_Answer):
    object: Literal["list"]
    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None


class RequestCounts(_Answer):
    total: _Count
    completed: _Count
    failed: _Count


class BatchError(_Answer):
    code: str
    message: str


class BatchErrors(_Answer):
    object: Literal["list"]
    data: list[BatchError]


class Batch(_Answer):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: _Time
    expires_at: _Time | None
    in_progress_at: _Time | None
    finalizing_at: _Time | None
    completed_at: _Time | None
    failed_at: _Time | None
    expired_at: _Time | None
    cancelling_at: _Time | None
    cancelled_at: _Time | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class Batches(_Answer):
    object: Literal["list"]
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None

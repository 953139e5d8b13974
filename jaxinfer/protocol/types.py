"""Bodies of requests: every field with its type and limits, written once.

`jaxinfer.protocol.convert.read` checks bodies against these types, and /openapi.json shows their schemas. null is absent, unknown
fields are ignored. What a type cannot say (fields that need or exclude each other, what the model knows) is checked where it is used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxinfer.engine.request import (
    BIAS_LIMIT,
    INTEGER_LIMITS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    NUMBER_LIMITS,
)

MAX_PROMPTS = 1024
_INT64 = 2**63
_END = r"(?!\n)$"  # Python's $ alone also matches before a newline at the end


def _within(name: str) -> Meta:
    """The limits of a field of SamplingParams."""
    if name == "top_p":
        return Meta(gt=NUMBER_LIMITS[name][0], le=NUMBER_LIMITS[name][1])
    low, high = (INTEGER_LIMITS.get(name) or NUMBER_LIMITS[name])[:2]
    return Meta(ge=low, le=high)


def _either(*types: Any) -> Meta:
    """A choice that msgspec cannot convert (more than one kind of array): whoever reads it tries the types in turn."""
    return Meta(extra_json_schema={"anyOf": [msgspec.json.schema(type_) for type_ in types]})


TokenId = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(min_length=1)]
_TokenIdKey = Annotated[str, Meta(pattern=rf"^[0-9]{{1,18}}{_END}", description="a token id")]
_Bias = Annotated[float, Meta(ge=-BIAS_LIMIT, le=BIAS_LIMIT)]
_Stop = _Text | Annotated[list[_Text], Meta(max_length=MAX_STOP_STRINGS)]
_BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
_Priority = Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1, description="lower runs first")]
_CacheSalt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=128,
        pattern=r"^[^@/\\\x00]*$",
        description="1 to 128 characters without @, /, \\ and NUL",
    ),
]

# A text or token ids; several of either.
One = str | Annotated[tuple[int, ...], Meta(min_length=1)]
Several = Annotated[tuple[str | tuple[int, ...], ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
TextsOrIds = Annotated[Any, _either(One, Several)]

# Parts of a message


class _WithText(msgspec.Struct):
    text: str


class TextPart(_WithText, tag_field="type", tag="text"):
    pass


class InputTextPart(_WithText, tag_field="type", tag="input_text"):
    pass


class OutputTextPart(_WithText, tag_field="type", tag="output_text"):
    pass


class ReasoningTextPart(_WithText, tag_field="type", tag="reasoning_text"):
    pass


class ImageURL(msgspec.Struct):
    url: str


class _WithImage(msgspec.Struct):
    image_url: str | ImageURL


class ImagePart(_WithImage, tag_field="type", tag="image_url"):
    pass


class InputImagePart(_WithImage, tag_field="type", tag="input_image"):
    pass


Part = TextPart | InputTextPart | OutputTextPart | ImagePart | InputImagePart


class Message(msgspec.Struct, kw_only=True):
    """A turn. Which roles and orders there may be is the chat template's word. Only a turn with tool_calls goes without content."""

    role: _Text
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


# Tools


class Function(msgspec.Struct, kw_only=True):
    name: Annotated[
        str,
        Meta(
            pattern=rf"^[A-Za-z0-9_.-]{{1,64}}{_END}",
            max_length=64,
            description="1 to 64 letters, digits, _, . or -",
        ),
    ]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class FlatTool(Function, kw_only=True):
    """A function as /v1/responses takes it."""

    type: Literal["function"]


class FunctionName(msgspec.Struct):
    name: str


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"] | None = None
    function: FunctionName


class FlatToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"] | None = None
    name: str


_ChoiceWord = Literal["none", "auto", "required"]
_MAX_TOOLS = Meta(min_length=1, max_length=128)

# Forms of an answer


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | bool | _Text
    name: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class FlatJsonSchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """A schema as /v1/responses takes it."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's: one of these. Others that are neither null nor false are refused."""

    json: dict[str, Any] | bool | _Text | None = None
    regex: _Text | None = None
    choice: Annotated[list[_Text], Meta(min_length=1)] | None = None
    grammar: _Text | None = None
    json_object: bool | None = None


# What generates


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that SamplingParams has under the same name."""

    min_tokens: Annotated[int, _within("min_tokens")] | None = None
    n: Annotated[int, _within("n")] | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, _within("top_k")] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    logit_bias: dict[_TokenIdKey, _Bias] | None = None
    seed: Annotated[int, _within("seed")] | None = None
    stop: _Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, _within("prompt_logprobs")] | None = None
    bad_words: Annotated[list[_BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    model: str | None = None
    max_tokens: Annotated[int, _within("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, _within("max_tokens")] | None = None
    best_of: int | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    priority: _Priority | None = None
    cache_salt: _CacheSalt | None = None


class CompletionBody(GenerationFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: TextsOrIds
    logprobs: Annotated[int, _within("logprobs")] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatFields(GenerationFields, kw_only=True):
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], _MAX_TOOLS] | None = None
    tool_choice: _ChoiceWord | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class ChatBody(ChatFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]


class InputItem(msgspec.Struct, kw_only=True):
    """What was said or called before. A message needs a role, a call a name and a call_id, its output a call_id."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: str | None = None
    content: str | list[Part | ReasoningTextPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Any = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None


class ResponseText(msgspec.Struct, kw_only=True):
    format: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """Body of /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, _within("max_tokens")] | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    seed: Annotated[int, _within("seed")] | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=128)] | None = None
    tool_choice: _ChoiceWord | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: ResponseText | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    priority: _Priority | None = None
    cache_salt: _CacheSalt | None = None


# The rest


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of /v1/embeddings."""

    input: TextsOrIds
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None


class TokenizeBody(ChatFields, kw_only=True):
    """Body of /tokenize: a prompt, or the body of a chat completion."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions"]


class Labelled(msgspec.Struct, kw_only=True):
    """A line of a batch."""

    custom_id: str | None = None


class BatchLineBody(msgspec.Struct, kw_only=True):
    """A line of a batch in OpenAI's form."""

    method: Literal["POST"]
    url: str
    body: Any


class BatchBody(msgspec.Struct, kw_only=True):
    """Body of /v1/batches."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: Literal["24h"] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None

"""Requests and answers of OpenAI's endpoints, with vLLM's further fields and ours (extensions.py)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from typing_extensions import NotRequired, TypedDict

from vllm.entrypoints.openai.protocol.base import (
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    UNREAD_OBJECT,
    Object,
    RequestModel,
    ResponseModel,
    Text,
    TokenId,
    TokenIds,
)
from vllm.entrypoints.openai.protocol.extensions import LabelEntry, PositionReadings, PromptReadingFields, ReadingFields
from vllm.sampling_params import MAX_STOP_STRINGS, LogprobsMode


def _check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, (str, list)):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    kinds = {type(each) for each in prompt} if isinstance(prompt, list) else set()
    if len(kinds) > 1 and kinds & {str, list}:
        raise ValueError("must hold texts, token ids or lists of token ids, not some of each")
    return prompt


NOT_EMPTY = Field(min_length=1)
PromptIds = Annotated[list[TokenId], NOT_EMPTY]
Prompt = Annotated[
    Text | Annotated[list[Text], NOT_EMPTY] | PromptIds | Annotated[list[PromptIds], NOT_EMPTY],
    UNREAD,
    AfterValidator(_check_prompt),
]
"""A text, texts, a list of token ids, or several; the engine's input processor checks it."""


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class TextMessage(TypedDict):
    """A message of a text or of parts."""

    role: Text
    content: str | list[str | TextPart]


class ToolCallMessage(TypedDict):
    """A message that may leave its text out."""

    role: Text
    tool_calls: Annotated[list[dict[str, Any]], NOT_EMPTY]
    content: NotRequired[None]


def _check_conversation(messages: list[Any]) -> list[Any]:
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("must be a list of one or more objects with role and content")
    return messages


Messages = Annotated[list[TextMessage | ToolCallMessage], NOT_EMPTY, UNREAD_LIST, AfterValidator(_check_conversation)]
"""A conversation; rendering it checks its messages."""

LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,20}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
    UNREAD_OBJECT,
]


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choice.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class GenerationFields(RequestModel, ReadingFields, PromptReadingFields):
    """What completions and chat share. Limits are those of SamplingParams, which checks the values."""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = REFUSED_FIELDS

    model: str = Field(description="One of the names in /v1/models.")
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None, UNREAD] = None
    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[Text | list[Text] | None, UNREAD] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], NOT_EMPTY, UNREAD_LIST] | None = None
    logprobs_mode: LogprobsMode | None = None
    vllm_xargs: Object | None = Field(None, description="Arguments of custom logits processors.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, description="Lower runs earlier, under --scheduling-policy priority.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="A part of the answer's id.")
    cache_salt: str | None = Field(None, min_length=1, description="Shares cached prefixes with equal salts only.")
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions"""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Usage(ResponseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class PromptLogprob(ResponseModel):
    """A prompt position's reading of one token."""

    logprob: float
    rank: int | None
    decoded_token: str | None
    logit: float | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChoiceFields(ResponseModel):
    """What a choice has beside its text, when it was asked for."""

    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    readings: list[PositionReadings] | None = None
    logits_values: dict[str, float | None] | None = None
    logits_values_per_token: list[dict[str, float | None]] | None = None


class CompletionLogprobs(ResponseModel):
    """OpenAI's classic shape. `tokens` put together are the text; a token that ends no character is an empty text, and
    the one that ends it has it whole. A key of `top_logprobs` is a token's text, or token_id:N when another has that
    text."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    token_ids: list[int]
    ranks: list[int | None]


class CompletionChoice(ChoiceFields):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None


class CompletionResponse(ResponseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    labels: list[LabelEntry] | None = None
    usage: Usage | None = None


class ChatLogprob(ResponseModel):
    """A token's reading."""

    token: str
    logprob: float
    bytes: list[int] | None
    token_id: int
    rank: int | None
    logit: float | None


class ChatPositionLogprobs(ChatLogprob):
    """A generated token, with the top-k and the requested ids."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(ResponseModel):
    """One entry a generated token."""

    content: list[ChatPositionLogprobs] | None
    refusal: None = None


class ChatMessage(ResponseModel):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None


class ChatChoice(ChoiceFields):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None


class ChatFields(ResponseModel):
    """What an answer has beside its choices; in a stream, the first chunk what belongs to the whole answer."""

    id: str
    created: int
    model: str
    labels: list[LabelEntry] | None = None
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionResponse(ChatFields):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatDelta(ResponseModel):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(ChoiceFields):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None


class ChatCompletionChunk(ChatFields):
    """An event of the streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ErrorInfo(ResponseModel):
    """What is wrong."""

    message: str = Field(min_length=1)
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """Every error of every route."""

    error: ErrorInfo

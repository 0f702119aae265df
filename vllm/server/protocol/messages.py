"""Requests and answers of /v1/messages, Anthropic's shape of chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from typing_extensions import NotRequired, TypedDict

from vllm.server.protocol.base import (
    ACCEPTED_FIELDS,
    NOT_EMPTY,
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    Object,
    Refusals,
    ResponseModel,
    Text,
    Texts,
)
from vllm.server.protocol.generation import ChatLogprobs, GenerationFields, PromptLogprobs, check_conversation

_OWN_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
# Claude Code sends an edit that leaves everything in.
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class Base64Source(TypedDict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp"]
    data: str


class UrlSource(TypedDict):
    type: Literal["url"]
    url: str


class ImageBlock(TypedDict):
    type: Literal["image"]
    source: Base64Source | UrlSource


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(TypedDict):
    type: Literal["redacted_thinking"]


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[TextBlock | ImageBlock] | None]


class Message(TypedDict):
    """A message as the schema describes it; `chat_fields` checks it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]


class MessagesCountRequest(GenerationFields):
    """POST /v1/messages/count_tokens"""

    ACCEPTED: ClassVar[tuple[str, ...]] = (
        *(name for name in ACCEPTED_FIELDS if name not in _OWN_FIELDS),
        "cache_control", "inference_geo", "diagnostics", "user_profile_id", "workspace_id", "betas", "billing_policy",
    )  # fmt: skip
    REFUSED: ClassVar[Refusals] = {
        **{name: each for name, each in REFUSED_FIELDS.items() if name not in _OWN_FIELDS},
        "container": ((), "nothing is run here"),
        "mcp_servers": (([],), "this server calls no tools"),
        "context_management": (({}, {"edits": []}, _KEEPS_ALL), "conversations are not edited"),
        "speed": (("standard",), "there is one speed"),
        "thread": ((), "no conversation is kept here: send all of its messages"),
        "compaction": ((), "conversations are not compacted"),
        "fallbacks": (([],), "no other model answers in place of this one"),
        "fallback_credit_token": ((), "no other model answers in place of this one"),
        "reasoning_effort": (("none",), "it is output_config.effort here"),
    }
    # The SDK then sends whole conversations.
    REFUSAL_DETAILS: ClassVar[dict[str, dict[str, Any]]] = {
        "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    }

    messages: Annotated[list[Message], NOT_EMPTY, UNREAD_LIST, AfterValidator(check_conversation)]
    system: Annotated[str | list[TextBlock] | None, UNREAD] = None
    tools: Annotated[list[dict[str, Any]], UNREAD_LIST] | None = None
    tool_choice: Object | None = Field(None, description='{"type": "auto"}, "any", "none", or "tool" with `name`.')
    thinking: Object | None = Field(
        None, description='{"type": "enabled", "budget_tokens": n}, "adaptive" or "disabled".'
    )
    output_config: Object | None = Field(None, description="`effort`, for the template; `format`, a JSON schema.")
    output_format: Object | None = Field(None, description="output_config.format")
    stop_sequences: Texts | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None

    @property
    def num_topk(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class MessagesRequest(MessagesCountRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, description="Where the context ends before, the answer does, too.")


class ContentBlock(ResponseModel):
    """A text, a thought, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesUsage(ResponseModel):
    input_tokens: int = Field(description="Without cached ones.")
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageExtras(ResponseModel):
    """Fields of our own, as in a choice of chat; a stream's last but one event has them."""

    labels: list[dict[str, Any]] | None = None
    logprobs: ChatLogprobs | None = None
    readings: list[dict[str, Any]] | None = None
    logits_values: dict[str, float | None] | None = None
    logits_values_per_token: list[dict[str, float | None]] | None = None
    allowed_mass: list[float] | None = None
    allowed_mass_total: float | None = None
    choice_readings: list[dict[str, Any]] | None = None
    field_readings: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class MessageObject(MessageExtras):
    id: Text
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageEvent(MessageExtras):
    """An event of a streamed message; `type` is also the event's name."""

    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message: MessageObject | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessagesUsage | None = None


class MessagesErrorInfo(ResponseModel):
    type: str
    message: str = Field(min_length=1)
    param: str | None
    code: str | None
    details: dict[str, Any] | None = Field(None, description="By which clients go on another way.")


class MessagesError(ResponseModel):
    type: Literal["error"]
    error: MessagesErrorInfo


class MessageTokens(ResponseModel):
    input_tokens: int

"""Requests and answers of /v1/responses and /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.server.protocol.base import (
    ACCEPTED_FIELDS,
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    Object,
    Refusals,
    RequestModel,
    ResponseModel,
    Text,
)
from vllm.server.protocol.generation import GenerationFields, PromptLogprobs, ReasoningConfig

Items = Annotated[str | list[dict[str, Any]] | None, UNREAD]
"""A text, or items; turning them into messages checks them."""

OneId = Annotated[str | dict[str, Any] | None, UNREAD]

_OWN_FIELDS = ("tools", "tool_choice", "reasoning", "metadata", "store", "parallel_tool_calls")


class TextConfig(RequestModel):
    """`text` of a response."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    format: Object | None = Field(None, description='{"type": "text"}, "json_object", "json_schema" with `schema`.')
    verbosity: str | None = Field(None, description="For the template.")


class ResponsesRequest(GenerationFields):
    """POST /v1/responses"""

    ACCEPTED: ClassVar[tuple[str, ...]] = tuple(name for name in ACCEPTED_FIELDS if name not in _OWN_FIELDS)
    REFUSED: ClassVar[Refusals] = {
        **{name: each for name, each in REFUSED_FIELDS.items() if name not in _OWN_FIELDS},
        "reasoning_effort": (("none",), "it is reasoning.effort here"),
        "verbosity": (("medium",), "it is text.verbosity here"),
        "background": ((False,), "answers are made while the client waits: stream them"),
        "prompt": ((), "no templates of prompts are kept here: send the texts as input"),
        "context_management": (([],), "conversations are not compacted; truncation auto leaves their beginning out"),
        "enable_response_messages": ((False,), "items are answered; return_token_ids adds the ids"),
        "previous_input_messages": (([],), "send them as input"),
    }

    input: Items = None
    instructions: str | None = Field(None, description="A system message before the input; never kept.")
    include: Annotated[list[str], UNREAD_LIST] | None = Field(
        None, description="message.output_text.logprobs; what else OpenAI can include does not occur here."
    )
    top_logprobs: int | None = Field(None, description="Most likely tokens of each position, with logprobs.")
    max_output_tokens: int | None = None
    max_tool_calls: int | None = Field(None, ge=1, description="Accepted; it is of tools that a server runs.")
    tools: Annotated[list[dict[str, Any]], UNREAD_LIST] | None = Field(None, description="Functions.")
    tool_choice: Annotated[str | dict[str, Any] | None, UNREAD] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the conversation's beginning if it is too long."
    )
    previous_response_id: str | None = Field(None, description="The response that the input follows.")
    conversation: OneId = Field(None, description="The conversation that the input follows; it gets both.")
    store: bool | None = Field(None, description="Whether later requests can name the response (the default).")
    metadata: Object | None = Field(None, description="Returned as it is.")
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None

    @property
    def num_topk(self) -> int | None:
        """None: no logprobs, as far as they do not come with chosen ids."""
        return self.top_logprobs or (0 if "message.output_text.logprobs" in (self.include or ()) else None)


class ConversationRequest(RequestModel):
    """POST /v1/conversations, and of one, to change its metadata."""

    TASK: ClassVar[str | None] = None
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    items: Annotated[list[dict[str, Any]] | None, UNREAD] = None
    metadata: Object | None = None


class ConversationItemsRequest(RequestModel):
    """POST /v1/conversations/ID/items"""

    TASK: ClassVar[str | None] = None
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    items: Annotated[list[dict[str, Any]], UNREAD]


class OutputPart(ResponseModel):
    """A part of a message (output_text, with `logprobs` in chat's shape) or of a reasoning item (reasoning_text)."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[dict[str, Any]] | None = None


class OutputItem(ResponseModel):
    """A message, a reasoning item or a call of a function."""

    type: Literal["message", "reasoning", "function_call"]
    id: Text
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(ResponseModel):
    """A response. Fields of our own, as in a choice of chat, follow the usage."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: dict[str, str] | None
    reasoning: dict[str, Any]
    background: Literal[False]
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, Any]
    user: None = None
    usage: ResponseUsage | None
    labels: list[dict[str, Any]] | None = None
    readings: list[dict[str, Any]] | None = None
    logits_values: dict[str, float | None] | None = None
    logits_values_per_token: list[dict[str, float | None]] | None = None
    allowed_mass: list[float] | None = None
    allowed_mass_total: float | None = None
    choice_readings: list[dict[str, Any]] | None = None
    field_readings: dict[str, list[dict[str, Any]]] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ResponseEvent(ResponseModel):
    """An event of a streamed response, in OpenAI's order; `type` is also the event's name."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class Deleted(ResponseModel):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class ItemList(ResponseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationObject(ResponseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int

"""Requests and answers of OpenAI's endpoints, with vLLM's further fields and our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import NotRequired, TypedDict

from vllm.exceptions import VLLMValidationError, shown
from vllm.params.sampling_fields import At
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.server.protocol.base import (
    NOT_EMPTY,
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    Object,
    PictureOptions,
    Refusals,
    RequestModel,
    ResponseModel,
    Text,
    Texts,
    TokenId,
    TokenIds,
)
from vllm.server.protocol.prompt_tables import PromptTableFields, PromptTables
from vllm.server.protocol.sampling import FormFields, sampling_body
from vllm.server.protocol.tools import ToolFields
from vllm.utils.checks import check_token_ids


class VersionFields(RequestModel):
    """Fields of completions and chat."""

    return_weight_versions: bool | None = None


REFUSED_OF_CHOICES = {
    name: each
    for name, each in REFUSED_FIELDS.items()
    if name not in {*VersionFields.model_fields, "kv_transfer_params"}
}
CHAT_ALONE = frozenset(
    "documents reasoning_effort reasoning include_reasoning thinking_token_budget verbosity prediction".split()
)


__all__ = [
    "BatchChatCompletionRequest",
    "ChatChoice", "ChatChunkChoice", "ChatCompletionChunk", "ChatCompletionRequest", "ChatCompletionResponse",
    "ChatDelta", "ChatFields", "ChatLogprob", "ChatLogprobs", "ChatMessage", "ChatPositionLogprobs", "ChoiceFields",
    "CompletionChoice", "CompletionLogprobs", "CompletionRequest", "CompletionResponse", "ErrorInfo", "ErrorResponse",
    "GenerationFields", "PromptLogprob", "StreamOptions", "Usage",
]  # fmt: skip


def _check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, (str, list)):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    kinds = {type(each) for each in prompt} if isinstance(prompt, list) else set()
    if len(kinds) > 1 and kinds & {str, list}:
        raise ValueError("must hold texts, token ids or lists of token ids, not some of each")
    return prompt


def _check_prediction(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None and not (value.get("type") == "content" and isinstance(value.get("content"), (str, list))):
        raise ValueError(
            "must be of type content, with a text or parts (it changes nothing: drafts are those of speculative_config)"
        )
    return value


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "repetition", "abort", "error"]

PromptIds = Annotated[list[TokenId], NOT_EMPTY]
Prompt = Annotated[
    Text | Annotated[list[Text], NOT_EMPTY] | PromptIds | Annotated[list[PromptIds], NOT_EMPTY],
    UNREAD,
    AfterValidator(_check_prompt),
]
"""Parsing checks only the outside; the engine's input processor checks the rest."""


def _check_embeds(embeds: Any) -> list[str]:
    texts = embeds if isinstance(embeds, list) else [] if embeds in (None, "") else [embeds]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a tensor as torch.save writes it, in base64, or a list of these")
    return texts


PromptEmbedsField = Annotated[str | list[Text] | None, UNREAD, AfterValidator(_check_embeds)]
"""A list: empty where there are none."""


class TextPart(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: str


class PictureUrl(TypedDict):
    url: str
    detail: NotRequired[Literal["auto", "low", "high", "original"] | None]


class PicturePart(TypedDict):
    """A picture for models that read them: a data: URL, or one that the server's arguments permit."""

    type: Literal["image_url", "input_image", "image"]
    image_url: NotRequired[str | PictureUrl | None]
    detail: NotRequired[Literal["auto", "low", "high", "original"] | None]
    uuid: NotRequired[Text | None]


class TextMessage(TypedDict):
    role: Text
    content: str | list[str | TextPart | RefusalPart | ThinkingPart | PicturePart]


class ToolCallMessage(TypedDict):
    """A message that may leave its text out."""

    role: Text
    tool_calls: Annotated[list[dict[str, Any]], NOT_EMPTY]
    content: NotRequired[None]


NOT_A_CONVERSATION = "must be a list of one or more objects with role and content"


def check_messages(messages: list[Any]) -> list[Any]:
    """The messages. ValueError: they are no objects."""
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError(NOT_A_CONVERSATION)
    return messages


def check_conversation(messages: list[Any]) -> list[Any]:
    """The messages. ValueError: they are no objects, or there are none."""
    if not messages:
        raise ValueError(NOT_A_CONVERSATION)
    return check_messages(messages)


def check_conversations(conversations: list[Any]) -> list[Any]:
    """As `check_conversation`, of several."""
    if not conversations:
        raise ValueError("must hold one or more conversations")
    for conversation in conversations:
        if not isinstance(conversation, list):
            raise ValueError("must be a list of conversations, each a list of messages")
        check_conversation(conversation)
    return conversations


Messages = Annotated[list[TextMessage | ToolCallMessage], NOT_EMPTY, UNREAD_LIST, AfterValidator(check_conversation)]
"""A conversation; rendering it checks its messages."""


class StreamOptions(RequestModel):
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choice.")
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk, with include_usage."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class ReasoningConfig(RequestModel):
    """`reasoning` of a response."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()
    REFUSED: ClassVar[Refusals] = {
        "context": (("auto", "all_turns"), "the template says which turns' reasoning the model sees"),
        "mode": (("standard",), "there is one way of reasoning"),
    }

    effort: str | None = Field(None, description="For the template.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted; the reasoning itself is answered."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="As summary.")


class ChatReasoning(ReasoningConfig):
    """`reasoning` of chat, with what other servers have there."""

    REFUSED: ClassVar[Refusals] = {
        **ReasoningConfig.REFUSED,
        "max_tokens": ((), "thinking_token_budget is the most tokens of reasoning"),
        "exclude": ((False,), "include_reasoning=false leaves the reasoning out of the answer"),
        "enabled": ((True,), "chat_template_kwargs.enable_thinking is for templates that know it"),
    }


# Two defaults as upstream has them in requests that are made in Python.
_TextsBody = sampling_body("_TextsBody", At.TEXTS, n=1, bad_words=list)


class GenerationFields(FormFields, _TextsBody):  # type: ignore[misc, valid-type]  # mypy sees no class
    """Fields of completions and chat."""

    REFUSED: ClassVar[Refusals] = {name: each for name, each in REFUSED_FIELDS.items() if name != "kv_transfer_params"}

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    labels: Texts | None = Field(
        None, description="Texts of one token each, read like logprob_token_ids; the answer says which ids they are."
    )
    logits_indices: TokenIds | None = Field(None, description="Token ids whose logits `logits_values` shall hold.")
    vllm_xargs: Object | None = Field(None, description="Arguments of custom logits processors.")
    kv_transfer_params: Object | None = Field(
        None,
        description="For the connector of --kv-transfer-config, whose own come with the answer. With --kv-store, "
        "do_remote_decode: true has the prompt's blocks on disk before the answer.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, description="Lower runs earlier, under --scheduling-policy priority.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="A part of the answer's id.")
    cache_salt: str | None = Field(None, min_length=1, description="Shares cached prefixes with equal salts only.")
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    mm_processor_kwargs: PictureOptions = None

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and value.model_fields_set and not info.data.get("stream"):
            raise ValueError("must be left out unless stream is true")
        return value

    @property
    def num_topk(self) -> int | None:
        """How many of the most likely tokens each generated position shows; None: no logprobs."""
        raise NotImplementedError

    @property
    def num_echo_topk(self) -> int | None:
        """How many of the most likely tokens each echoed position shows; None: none is read."""
        return None

    @property
    def extra_args(self) -> dict[str, Any] | None:
        """Arguments of logits processors and of the connector."""
        if not self.kv_transfer_params:
            return self.vllm_xargs
        return {**(self.vllm_xargs or {}), "kv_transfer_params": self.kv_transfer_params}

    def sampling_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        # A beam search draws nothing: defaults of sampling are none of it.
        kept = {"temperature": 0.0, "stop_token_ids": defaults.get("stop_token_ids")}
        fields = super().sampling_fields(kept if self.use_beam_search else defaults)
        return fields | {"structured_outputs": self.form(fields.get("structured_outputs"))}

    def to_sampling_params(
        self, max_tokens: int | None, default_sampling_params: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The request's parameters, for callers that run it on an engine of their own.

        Args:
            max_tokens: how many tokens to generate; None: as many as fit.
            default_sampling_params: values of fields that the request leaves out.

        Raises:
            VLLMValidationError: a value out of its range, or `labels`, whose ids the server looks up.
        """
        if self.labels:
            raise VLLMValidationError(
                "labels need the server's tokenizer: give logprob_token_ids", "labels", self.labels
            )
        names = ("logprob_token_ids", "logits_indices")
        ids = [each for name in names for each in check_token_ids(name, getattr(self, name))]
        fields = self.sampling_fields(default_sampling_params or {})
        if self.num_echo_topk is not None:
            fields["prompt_logprobs"] = self.num_echo_topk
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        fields |= {"max_tokens": max_tokens, "logprobs": self.num_topk, "logprob_token_ids": ids}
        return SamplingParams(**fields, extra_args=self.extra_args, output_kind=kind)


class CompletionRequest(VersionFields, GenerationFields, PromptTableFields):
    """POST /v1/completions"""

    REFUSED: ClassVar[Refusals] = {name: each for name, each in REFUSED_OF_CHOICES.items() if name != "prompt_embeds"}

    prompt: Prompt
    prompt_embeds: PromptEmbedsField = Field(
        None,
        description="A tensor [T, H] as torch.save writes it, in base64, or several: prompts in place of `prompt`, "
        "which may then be left out, or before it. With --enable-prompt-embeds.",
    )
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_embeds_alone(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("prompt_embeds") and not fields.get("prompt"):
            return {**fields, "prompt": []}
        return fields

    @property
    def num_topk(self) -> int | None:
        return self.logprobs

    @property
    def num_echo_topk(self) -> int | None:
        reads = self.logprobs is not None or self.logprob_token_ids or self.labels or self.logits_indices
        return (self.logprobs or 0) if self.echo and reads else None


class ChatCompletionRequest(ToolFields, VersionFields, GenerationFields):
    """POST /v1/chat/completions"""

    REFUSED: ClassVar[Refusals] = {
        name: each for name, each in REFUSED_OF_CHOICES.items() if name not in {*ToolFields.model_fields, *CHAT_ALONE}
    }

    # Requests that are made in Python, for a parser, may have none.
    messages: Annotated[list[TextMessage | ToolCallMessage], NOT_EMPTY, UNREAD_LIST, AfterValidator(check_messages)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, AfterValidator(lambda value: value or 0)] = 0
    max_completion_tokens: int | None = Field(None, description="Wins over max_tokens.")
    documents: Annotated[list[dict[str, Any]], UNREAD_LIST] | None = Field(None, description="For the template.")
    reasoning_effort: str | None = Field(None, description="For the template.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="The most tokens of reasoning, with --reasoning-parser; -1: any number."
    )
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the answer.")
    reasoning: ChatReasoning | None = Field(None, description="`effort` is reasoning_effort.")
    verbosity: str | None = Field(None, description="For the template.")
    prediction: Annotated[Object | None, AfterValidator(_check_prediction)] = Field(
        None, description="Accepted; drafts are those of speculative_config."
    )
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = Field(None, description="Begin with the last message's text, if it is of the answer's role.")

    @property
    def num_topk(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> str | None:
        """The reasoning's, by either name. VLLMValidationError: they differ."""
        named = None if self.reasoning is None else self.reasoning.effort
        given = self.reasoning_effort
        if named is not None and given not in (None, named):
            message = f"reasoning.effort and reasoning_effort exclude each other: got {shown(named)} and {shown(given)}"
            raise VLLMValidationError(message, "reasoning", named)
        return given or named


class BatchChatCompletionRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch: one choice (or n) for each of several conversations."""

    messages: Annotated[list[Messages], NOT_EMPTY, UNREAD_LIST, AfterValidator(check_conversations)]  # type: ignore[assignment]

    def to_chat_completion_request(self, messages: list[Any]) -> ChatCompletionRequest:
        """The request for one of the conversations."""
        fields = {name: getattr(self, name) for name in ChatCompletionRequest.model_fields if name != "messages"}
        return ChatCompletionRequest.model_construct(messages=messages, **fields)


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class Timings(ResponseModel):
    """Times of a sequence, in milliseconds."""

    time_to_first_token_ms: float | None = Field(description="From being scheduled to the first token.")
    generation_time_ms: float | None = Field(description="From the first token to the last one.")
    queue_time_ms: float | None = Field(description="From arriving to being scheduled.")
    mean_itl_ms: float | None = Field(description="Between two tokens; null for a single one.")
    tokens_per_second: float | None = Field(description="From being scheduled to the last token.")


_TIMINGS = "With --enable-per-request-metrics; null for several sequences."


class LabelEntry(ResponseModel):
    label: str
    token_id: int


class TokenReading(ResponseModel):
    """A requested token at one position; numbers are null where a logits processor made the token impossible."""

    token: str | None
    label: str | None = None
    logprob: float | None
    logit: float | None
    rank: int | None
    probability: float | None = Field(description="Softmax over the requested tokens alone.")


AnswerPart = Literal["reasoning", "content", "tool_call"]
_PART = "What the token belongs to, where answers have parts: with tools or --reasoning-parser."


class PositionReadings(ResponseModel):
    """The requested tokens at one generated position."""

    token_id: int | None = Field(description="The token that was generated; null when none was (max_tokens=0).")
    ids: dict[str, TokenReading] = Field(description="By token id, in the order asked.")
    mass: float | None = Field(description="Probability of all requested tokens together.")
    lse: float | None = Field(description="Log of the sum of exp of the position's logits.")
    entropy: float | None = None
    part: AnswerPart | None = Field(None, description=_PART)


class PromptLogprob(ResponseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None
    logit: float | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ValueReading(ResponseModel):
    """A value that the form allows, after what the answer has before it."""

    value: Any = Field(description="As JSON has it; a choice is a text.")
    text: str = Field(description="What was read: it may begin with what stands between the last token and the value.")
    token_ids: list[int]
    logprob: float | None = Field(description="Of the text; null where it is impossible or the context was too short.")
    share: float | None = Field(description="Its part of the probability of all values.")
    chosen: bool = Field(description="Whether the answer has it.")


class ChoiceFields(ResponseModel):
    """Optional fields of a choice, present when the request asked for them."""

    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[int | str] | None = Field(None, description="Of the weights that its tokens so far are of.")
    prompt_logprobs: PromptLogprobs | None = None
    readings: list[PositionReadings] | None = None
    logits_values: dict[str, float | None] | None = None
    logits_values_per_token: list[dict[str, float | None]] | None = None
    allowed_mass: list[float] | None = Field(None, description="The model's probability of the form, one a token.")
    allowed_mass_total: float | None = Field(None, description="Sum of their logarithms so far.")
    choice_readings: list[ValueReading] | None = Field(
        None, description="With choice_readings: each choice, in the form's order. In a stream with the last chunk."
    )
    field_readings: dict[str, list[ValueReading]] | None = Field(
        None, description="With field_readings: by path ($.items[0].kind), each value. In a stream with the last chunk."
    )


class CompletionLogprobs(ResponseModel):
    """OpenAI's classic shape. `tokens` concatenated are the text: a token that completes no character is empty, and the
    one that completes it has it whole. Keys of `top_logprobs` are texts, or token_id:N where another token has it."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    token_ids: list[int]
    ranks: list[int | None]


class CompletionChoice(ChoiceFields):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_tables: PromptTables | None = None


class CompletionResponse(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    prompt_index: int | None = Field(None, description="In a stream: the prompt that prompt_tables are of.")
    prompt_tables: PromptTables | None = Field(None, description="In a stream: further rows.")
    labels: list[LabelEntry] | None = None
    usage: Usage | None = None
    metrics: Timings | None = Field(None, description=_TIMINGS)


class ChatLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    token_id: int
    rank: int | None
    logit: float | None


class ChatPositionLogprobs(ChatLogprob):
    """A generated token, with the top-k, itself where it is not one of them, and the requested ids."""

    top_logprobs: list[ChatLogprob]
    part: AnswerPart | None = Field(None, description=_PART)


class ChatLogprobs(ResponseModel):
    content: list[ChatPositionLogprobs] | None
    refusal: None = None


class FunctionCallFields(ResponseModel):
    """A function that is called; `arguments` is a text of JSON, in a stream a piece of it."""

    name: str | None = None
    arguments: str


class ToolCallFields(ResponseModel):
    """A call; in a stream what is new of it, by its index."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallFields


class MessageParts(ResponseModel):
    """Parts that an answer may have beside its content."""

    reasoning: str | None = Field(None, description="With --reasoning-parser.")
    reasoning_content: str | None = Field(None, description="The same.")
    tool_calls: list[ToolCallFields] | None = None
    function_call: FunctionCallFields | None = Field(None, description="Where the request has `functions`.")


class ChatMessage(MessageParts):
    """`reasoning` and the fields below are there in any case: clients read them without asking."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None


class ChatChoice(ChoiceFields):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatFields(ResponseModel):
    """Fields beside the choices; a stream sends `labels` and the prompt's fields with its first chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    labels: list[LabelEntry] | None = None
    usage: Usage | None = None
    metrics: Timings | None = Field(None, description=_TIMINGS)
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionResponse(ChatFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatDelta(MessageParts):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(ChoiceFields):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(ChatFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ErrorInfo(ResponseModel):
    message: str = Field(min_length=1)
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorInfo

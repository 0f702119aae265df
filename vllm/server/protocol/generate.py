"""Requests and answers of /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vllm.params.sampling_fields import At
from vllm.sampling_params import FIELDS
from vllm.server.protocol.base import (
    NOT_EMPTY,
    REFUSED_FIELDS,
    UNREAD_LIST,
    Refusals,
    RequestModel,
    ResponseModel,
    TokenId,
    refused_at,
)
from vllm.server.protocol.generation import (
    ChatMessage,
    FinishReason,
    PromptLogprobs,
    StreamOptions,
    Timings,
    Usage,
    ValueReading,
)
from vllm.server.protocol.prompt_tables import PromptTableFields, PromptTables
from vllm.server.protocol.sampling import sampling_body

OutputMode = Literal["tokens", "text", "derender"]


class GenerateSamplingParams(sampling_body("_IdsBody", At.IDS)):  # type: ignore[misc]  # mypy sees no class
    """SamplingParams as an object, which checks the values. Fields left out have the model's defaults, or else vLLM's;
    without max_tokens, as many are generated as fit."""

    ACCEPTED: ClassVar[tuple[str, ...]] = tuple(name for name, row in FIELDS.items() if At.IDS in row.ignored_at)
    REFUSED: ClassVar[Refusals] = refused_at(At.IDS)


class GenerateRequest(PromptTableFields):
    """POST /inference/v1/generate"""

    ACCEPTED: ClassVar[tuple[str, ...]] = ("parse_context", "reasoning_ended", "reasoning_parser_kwargs")
    REFUSED: ClassVar[Refusals] = {
        "features": ((), "prompts are token ids"),
        "content_parts": (([],), "prompts are token ids"),
        **{name: REFUSED_FIELDS[name] for name in ("kv_transfer_params", "ec_transfer_params")},
    }

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    token_ids: Annotated[list[TokenId], NOT_EMPTY, UNREAD_LIST]
    sampling_params: GenerateSamplingParams
    prompt: str | None = Field(None, description="The text that token_ids are of, for the log; it is not tokenised.")
    output_mode: OutputMode | None = Field(
        None, description="tokens (the default): ids alone; text: the text, too; derender: an assistant's message, too."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Add the prompt's ids as they were used.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="A part of the answer's request_id.")
    cache_salt: str | None = Field(None, min_length=1, description="Shares cached prefixes with equal salts only.")
    priority: int | None = Field(None, description="Lower runs earlier, under --scheduling-policy priority.")

    @property
    def max_tokens(self) -> int | None:
        """`max_tokens` of the sampling parameters."""
        return self.sampling_params.max_tokens


class AbortRequest(RequestModel):
    """POST /inference/v1/abort_requests"""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    request_ids: Annotated[list[str], UNREAD_LIST] = Field(description="As answers have them.")


class IdLogprob(ResponseModel):
    token_id: int | None
    logprob: float | None
    rank: int | None
    logit: float | None
    token: str | None = Field(None, description="Not with output_mode tokens, as the next one.")
    bytes: list[int] | None = None


class IdPositionLogprobs(IdLogprob):
    """A generated token (null where max_tokens=0 generates none), and all entries of its position, itself first."""

    top_logprobs: list[IdLogprob]


class GenerateLogprobs(ResponseModel):
    content: list[IdPositionLogprobs]


class GenerateChoice(ResponseModel):
    index: int
    token_ids: list[int]
    logprobs: GenerateLogprobs | None
    allowed_mass: list[float] | None = None
    allowed_mass_total: float | None = None
    choice_readings: list[ValueReading] | None = None
    field_readings: dict[str, list[ValueReading]] | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    text: str | None = Field(None, description="With output_mode text.")
    message: ChatMessage | None = Field(None, description="With output_mode derender.")


class GenerateResponse(ResponseModel):
    """An answer, or a chunk of one: then choices hold what is new, and the first chunk has the prompt's fields."""

    request_id: str
    output_mode: OutputMode
    choices: list[GenerateChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = Field(
        None, description="Of prompt_logprob_token_ids: a .npy file of float32 [rows, K], in base64; -inf at padding."
    )
    prompt_tables: PromptTables | None = Field(None, description="In a stream: further rows.")
    usage: Usage | None = None
    metrics: Timings | None = Field(None, description="With --enable-per-request-metrics; null for several sequences.")

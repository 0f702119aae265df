"""Requests and answers of /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.sampling_params import MAX_STOP_STRINGS, LogprobsMode
from vllm.server.protocol.base import (
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    IdRows,
    LogitBias,
    Object,
    RequestModel,
    ResponseModel,
    Text,
    TokenId,
    TokenIds,
)
from vllm.server.protocol.generation import (
    NOT_EMPTY,
    ChatMessage,
    FinishReason,
    PromptLogprobs,
    RepetitionDetection,
    StreamOptions,
    Timings,
    Usage,
)

_BEAMS = "beam searches run by /v1/completions, /v1/chat/completions and LLM.beam_search"

OutputMode = Literal["tokens", "text", "derender"]


def _refused(*names: str) -> dict[str, tuple[tuple[Any, ...], str]]:
    return {name: REFUSED_FIELDS[name] for name in names}


class GenerateSamplingParams(RequestModel):
    """SamplingParams as an object, which checks the values. Fields left out have the model's defaults, or else vLLM's;
    without max_tokens, as many are generated as fit."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ("output_kind", "flat_logprobs", "skip_clone")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_refused("watermarking", "structured_outputs", "thinking_token_budget", "routed_experts_prompt_start"),
        **_refused("logits_processors"),
        "use_beam_search": ((False,), _BEAMS),
        "length_penalty": ((1,), _BEAMS),
        "early_stopping": ((False,), _BEAMS),
    }

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
    detokenize: bool | None = Field(None, description="Left out, as far as output_mode and stop need it.")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], NOT_EMPTY, UNREAD_LIST] | None = None
    logprobs: int | None = None
    logprob_token_ids: TokenIds | None = Field(None, description="Ids to read at every generated position.")
    logprob_entropy: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: IdRows | None = Field(
        None, description="Ids to read at all prompt positions, or a row of ids a position, with -1 as padding."
    )
    prompt_logprob_start: int | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: TokenIds | None = Field(
        None, description="Tokens to generate whatever the model says, with their readings; max_tokens is their number."
    )
    repetition_detection: RepetitionDetection | None = None
    stream_interval: int | None = Field(None, description="Tokens a chunk, after the first one; 1 when left out.")
    extra_args: Object | None = Field(None, description="Arguments of custom logits processors.")


class GenerateRequest(RequestModel):
    """POST /inference/v1/generate"""

    ACCEPTED: ClassVar[tuple[str, ...]] = ("parse_context", "reasoning_ended", "reasoning_parser_kwargs")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "features": ((), "prompts are token ids"),
        "content_parts": (([],), "prompts are token ids"),
        **_refused("kv_transfer_params", "ec_transfer_params"),
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
        """Of the sampling parameters."""
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
    usage: Usage | None = None
    metrics: Timings | None = Field(None, description="With --enable-per-request-metrics; null for several sequences.")

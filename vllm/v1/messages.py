"""Messages into the engine core and out of it for one request."""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs.embeds import PromptEmbeds
from vllm.inputs.images import PromptImages
from vllm.logprobs.lists import LogprobsRow, LogprobsRows
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.struct import Struct

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")


class FinishReason(enum.IntEnum):
    """Why a sequence ended, as upstream numbers it. Outputs hold the word: `str(FinishReason.STOP)` is "stop"."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


@dataclass
class EngineCoreRequest:
    """One sequence to generate, tokenised and validated; the fields are the arguments of Request.

    Callers of upstream's may pass mm_features and data_parallel_rank as None.

    Raises:
        VLLMValidationError: one of these is not None.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # n == 1, no best_of, max_tokens set
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0  # seconds, monotonic clock
    priority: int = 0
    cache_salt: str | None = None
    mm_features: InitVar[Any] = None
    pooling_params: PoolingParams | None = None  # a pooling model's requests have these, and no sampling_params
    lora_request: LoRARequest | None = None
    data_parallel_rank: InitVar[Any] = None
    prompt_embeds: PromptEmbeds | None = None  # in place of some of the ids
    images: PromptImages | None = None
    session_id: str | None = None
    kv_hints: Any = None  # dicts, lists, texts and numbers

    def __post_init__(self, mm_features: Any, data_parallel_rank: Any) -> None:
        asked = {"mm_features": mm_features, "data_parallel_rank": data_parallel_rank}
        for name, value in asked.items():
            if value is not None:
                raise VLLMValidationError(f"{name} must be None here: requests are of text, without it", name, value)


class EngineCoreOutput(Struct, array_like=True):
    """A step's new tokens and readings of a request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[LogprobsRow] | None = None  # one a new token
    finish_reason: str | None = None  # "stop", "length", "repetition", "abort", "error"
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[LogprobsRows] | None = None  # further prompt positions that were read
    scheduled_time: float | None = None  # when it was first scheduled, in seconds on the monotonic clock
    pooling_output: Any = None  # a tensor of float32 on the CPU, or None
    # One a new token, where it is read: logarithm of the probability of what the grammar allowed.
    allowed_mass: list[float] | None = None
    num_drafted: int = 0  # tokens that a step computed as drafts
    num_accepted: int = 0  # of these, those that were right
    kv_transfer_params: dict[str, Any] | None = None  # at the end: for who computes on, from a connector

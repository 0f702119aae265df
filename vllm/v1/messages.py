"""What goes into the engine core and comes out of it for one request."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logprobs.lists import LogprobsRow, LogprobsRows
from vllm.sampling_params import SamplingParams


@dataclass
class EngineCoreRequest:
    """One sequence to generate, tokenised and validated; the fields are the arguments of Request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # n == 1, no best_of, max_tokens set
    eos_token_ids: frozenset[int]
    arrival_time: float  # seconds, monotonic clock
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step added to a request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[LogprobsRow] | None = None  # one a new token
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[LogprobsRows] | None = None  # further prompt positions that were read
    scheduled_time: float | None = None  # when it was first scheduled, in seconds on the monotonic clock

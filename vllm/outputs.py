"""What a call to the engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import FlatLogprobs, PromptLogprobs


@dataclass
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's n sequences.
        text: the generated text (without a stop string unless it was asked for).
        token_ids: the generated ids.
        cumulative_logprob: sum of the sampled tokens' logprobs; None when no readings were asked for, unless
            several sequences were compared by it.
        logprobs: one `{token_id: Logprob}` a position, over numpy arrays; None when none were asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token.
        error: what went wrong when finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """The output of one request.

    Attributes:
        request_id: the id it was given.
        prompt: the prompt's text; None when token ids were given.
        prompt_token_ids: the prompt's ids.
        prompt_logprobs: one `{token_id: Logprob}` a prompt position, None for those that were not read (the first
            never can be); None when none were asked for.
        outputs: one CompletionOutput a sequence, by index.
        finished: whether all sequences have ended.
        metrics: its times.
        lora_request: always None; kept for callers that read it.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    lora_request: Any | None = None
    num_cached_tokens: int | None = None

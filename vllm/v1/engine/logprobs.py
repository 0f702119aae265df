"""Collects one request's readings, step by step: copies of its own rows, so that no step's arrays outlive the step."""

from __future__ import annotations

from functools import partial

from vllm.logprobs import FlatLogprobs, PromptLogprobs, TokenDecoder
from vllm.logprobs.lists import LogprobsRow, LogprobsRows
from vllm.sampling_params import SamplingParams


class LogprobsProcessor:
    """The readings of one sequence so far, for requests whose `num_logprobs` is not None."""

    def __init__(self, params: SamplingParams, decode: TokenDecoder | None) -> None:
        self._has_sampled = params.max_tokens != 0
        self._num_token_ids = len(params.logprob_token_ids or ())
        self._empty = partial(
            FlatLogprobs,
            decode=decode,
            num_topk=params.logprobs or 0,
            as_logits=_as_logits(params),
            has_sampled=self._has_sampled,
            has_entropy=params.logprob_entropy,
            has_ranks=params.logprob_ranks,
        )
        self._readings = self._empty()
        self.cumulative_logprob = 0.0  # of the sampled tokens

    def append(self, rows: list[LogprobsRow]) -> None:
        """Add a row for each newly generated token, or, with max_tokens=0, that of the next position."""
        for row in rows:
            self._readings.append(row, self._num_token_ids)
            if self._has_sampled:
                lists, index = row
                self.cumulative_logprob += lists.first_logprob(index)

    def readings(self) -> FlatLogprobs:
        """A snapshot of the readings so far."""
        return self._readings.snapshot()

    def take(self) -> FlatLogprobs:
        """The readings since the last take (for streamed deltas)."""
        readings, self._readings = self._readings, self._empty()
        return readings


class PromptLogprobsProcessor:
    """The readings of a prompt's positions so far, for requests that ask for them."""

    def __init__(self, params: SamplingParams, prompt_len: int, decode: TokenDecoder | None) -> None:
        start = params.first_prompt_row
        assert start is not None, "no prompt readings were asked for"
        self._first = start + 1
        self._requested = params.prompt_ids_np if params.prompt_logprob_token_ids is not None else None
        self._empty = partial(
            PromptLogprobs,
            decode=decode,
            num_topk=params.prompt_logprobs or 0,
            as_logits=_as_logits(params),
            has_entropy=params.logprob_entropy,
            has_ranks=params.logprob_ranks,
        )
        self._is_a_position = params.has_prompt_ids_a_position
        self._prompt_len = prompt_len
        self.readings = self._part(self._first)

    def append(self, rows: list[LogprobsRows]) -> None:
        """Add further positions, in order."""
        for each in rows:
            self.readings.append_rows(each)

    def take(self) -> PromptLogprobs:
        """The readings since the last take."""
        readings = self.readings
        self.readings = self._part(len(readings))
        return readings

    def _part(self, first: int) -> PromptLogprobs:
        """For the readings of position `first` and those after it."""
        requested = self._requested
        if requested is not None and self._is_a_position:
            requested = requested[first - self._first :]
        return self._empty(num_unread=first, requested=requested)

    @property
    def is_complete(self) -> bool:
        return len(self.readings) >= self._prompt_len


def _as_logits(params: SamplingParams) -> bool:
    return (params.logprobs_mode or "").endswith("logits")

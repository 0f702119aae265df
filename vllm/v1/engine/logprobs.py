"""Gathers one request's readings, step by step, by reference to the steps' arrays."""

from __future__ import annotations

from vllm.logprobs import FlatLogprobs, LogprobsRow, TokenDecoder
from vllm.sampling_params import SamplingParams


class LogprobsProcessor:
    """The readings of one sequence so far. Exists only when `num_logprobs` is not None."""

    def __init__(self, params: SamplingParams, decode: TokenDecoder | None) -> None:
        self._decode = decode
        self._num_topk = params.logprobs or 0
        self._num_token_ids = len(params.logprob_token_ids or ())
        self._as_logits = (params.logprobs_mode or "").endswith("logits")
        self.cumulative_logprob = 0.0
        self._rows: list[LogprobsRow] = []

    @classmethod
    def from_params(cls, params: SamplingParams, decode: TokenDecoder | None) -> LogprobsProcessor | None:
        """A processor, or None when the request asked for no readings."""
        return None if params.num_logprobs is None else cls(params, decode)

    def append(self, rows: list[LogprobsRow]) -> None:
        """Add one row for each newly generated token."""
        self._rows += rows
        for row in rows:
            self.cumulative_logprob += float(row.lists.logprobs[row.row, 0])

    def readings(self) -> FlatLogprobs:
        """The readings so far; what is returned stays as it is when more come."""
        readings = FlatLogprobs(self._decode, self._num_topk, self._as_logits)
        for row in self._rows:
            readings.append_row(row, self._num_token_ids)
        return readings

    def take(self) -> FlatLogprobs:
        """The readings since the last take, which then start afresh (for streamed deltas)."""
        readings = self.readings()
        self._rows = []
        return readings

"""The token counts of a request."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request

from vllm.outputs import RequestMetrics, RequestOutput
from vllm.server.protocol.generation import StreamOptions
from vllm.server.state import ServerState, server_state

CACHED_STEP = 16
"""Counts of cached tokens are shown rounded down to its multiples: exact ones would reveal other clients' prompts token
by token."""


def cached_tokens_shown(output: RequestOutput) -> int:
    """The prompt's cached tokens, rounded down."""
    return (output.num_cached_tokens or 0) // CACHED_STEP * CACHED_STEP


def answer_frame(state: ServerState, answer_id: str) -> dict[str, Any]:
    """First fields of every chunk and every whole answer."""
    frame = {"id": answer_id, "created": int(time.time()), "model": state.answer_name}
    return frame if state.fingerprint is None else {**frame, "system_fingerprint": state.fingerprint}


def list_frame(state: ServerState, answer_id: str) -> dict[str, Any]:
    """Fields of a list of results beside the results and `usage`."""
    return {"id": answer_id, "object": "list", "created": int(time.time()), "model": state.answer_name}


def timings(times: RequestMetrics, num_tokens: int) -> dict[str, float | None]:
    """Upstream's `metrics` of a request for one sequence of `num_tokens`; null where a time was not reached."""
    scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.finished_time

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else 1000 * (end - start)

    decode, whole = between(first, last), between(scheduled, last)
    return {
        "time_to_first_token_ms": between(scheduled, first),
        "generation_time_ms": decode,
        "queue_time_ms": between(times.arrival_time, scheduled),
        "mean_itl_ms": None if decode is None or num_tokens < 2 else decode / (num_tokens - 1),
        "tokens_per_second": 1000 * num_tokens / whole if whole else None,
    }


class UsageCount:
    """Tokens of a request's prompts and answers so far, and when chunks of a stream show them."""

    def __init__(self, request: Request, options: StreamOptions | None = None, is_forced: bool = False) -> None:
        self._request = request
        self._prompts: set[int] = set()  # indices of counted ones
        self._cached: dict[int, int] = {}  # by prompt; known once it has been read
        self._num_sequences = 0
        self._times: RequestMetrics | None = None
        self._counts = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self.is_wanted_last = is_forced or (options is not None and bool(options.include_usage))
        # As upstream: the server's flag asks for all, and continuous_usage_stats without include_usage for nothing.
        continuous = options is not None and bool(options.continuous_usage_stats)
        self.in_every_chunk = is_forced or (self.is_wanted_last and continuous)

    def add(self, index: int, output: RequestOutput) -> None:
        """Count the new tokens of an output of prompt `index`, and the prompt once."""
        # Updated in place, so that the log shows the usage of a stream that is cut short.
        self._request.state.usage = self._counts
        if index not in self._prompts:
            self._prompts.add(index)
            self._counts["prompt_tokens"] += len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached.setdefault(index, cached_tokens_shown(output))
        self._times = output.metrics
        self._num_sequences = max(self._num_sequences, *(each.index + 1 for each in output.outputs), 0)
        self._counts["completion_tokens"] += sum(len(completion.token_ids) for completion in output.outputs)
        self._counts["total_tokens"] = self._counts["prompt_tokens"] + self._counts["completion_tokens"]

    def fields(self) -> dict[str, Any]:
        """An answer's `usage`."""
        return {**self._counts, "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())}}

    def last_fields(self) -> dict[str, Any]:
        """`usage` of a whole answer and, with --enable-per-request-metrics, `metrics`."""
        fields: dict[str, Any] = {"usage": self.fields()}
        if server_state(self._request).args.enable_per_request_metrics:
            times = self._times if len(self._prompts) == self._num_sequences == 1 else None
            fields["metrics"] = None if times is None else timings(times, self._counts["completion_tokens"])
        return fields

    def last_chunk_fields(self) -> dict[str, Any]:
        """The fields of a stream's last chunk beside its frame; as upstream, times that were not reached are left
        out."""
        fields = {"choices": [], **self.last_fields()}
        if times := fields.pop("metrics", None):
            fields["metrics"] = {name: each for name, each in times.items() if each is not None}
        return fields

    def so_far(self) -> dict[str, Any]:
        """The `usage` field of a chunk, if any."""
        if self.in_every_chunk:
            return {"usage": self.fields()}
        return {"usage": None} if self.is_wanted_last else {}

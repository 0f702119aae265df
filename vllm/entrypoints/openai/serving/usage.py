"""The token counts of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.protocol.generation import StreamOptions
from vllm.outputs import RequestOutput

_CACHED_STEP = 16


def cached_tokens_shown(output: RequestOutput) -> int:
    """The prompt's cached tokens, rounded down to a multiple of 16: exact counts would reveal other clients' prompts
    token by token."""
    return (output.num_cached_tokens or 0) // _CACHED_STEP * _CACHED_STEP


class UsageCount:
    """Tokens of a request's prompts and answers so far; `counts`, by their names in answers, is updated in place."""

    def __init__(self) -> None:
        self._prompts: set[int] = set()  # indices of counted ones
        self._num_cached = 0
        self.counts = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}

    def add(self, index: int, output: RequestOutput) -> None:
        """Count the new tokens of an output of prompt `index`, and the prompt once."""
        if index not in self._prompts:
            self._prompts.add(index)
            self.counts["prompt_tokens"] += len(output.prompt_token_ids)
            self.counts["total_tokens"] += len(output.prompt_token_ids)
            self._num_cached += cached_tokens_shown(output)
        for completion in output.outputs:
            self.counts["completion_tokens"] += len(completion.token_ids)
            self.counts["total_tokens"] += len(completion.token_ids)

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> UsageCount:
        """The counts of the finished outputs of all prompts."""
        count = cls()
        for index, output in enumerate(outputs):
            count.add(index, output)
        return count

    def fields(self) -> dict[str, Any]:
        """An answer's `usage`."""
        return {**self.counts, "prompt_tokens_details": {"cached_tokens": self._num_cached}}


class StreamUsage(UsageCount):
    """The counts of a stream, which chunks show by its options."""

    def __init__(self, options: StreamOptions | None, request: Request) -> None:
        super().__init__()
        self._request = request
        self._in_every_chunk = options is not None and bool(options.continuous_usage_stats)
        self.is_wanted_last = options is not None and bool(options.include_usage)

    def add(self, index: int, output: RequestOutput) -> None:
        # From the first output on, so that the log shows the usage of a stream that is cut short.
        self._request.state.usage = self.counts
        super().add(index, output)

    def so_far(self) -> dict[str, Any]:
        """The `usage` field of a chunk, if any."""
        if self._in_every_chunk:
            return {"usage": self.fields()}
        return {"usage": None} if self.is_wanted_last else {}

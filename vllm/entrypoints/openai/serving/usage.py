"""The token counts of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.protocol.generation import StreamOptions
from vllm.outputs import RequestOutput

_CACHED_STEP = 16


def cached_tokens_told(output: RequestOutput) -> int:
    """How many of the prompt's tokens were in the cache, in whole steps of 16: who saw every single one could find out
    what others have sent, token by token."""
    return (output.num_cached_tokens or 0) // _CACHED_STEP * _CACHED_STEP


class UsageCount:
    """Tokens of a request's prompts and answers, so far.

    Attributes:
        counts: by their names in answers; one dict that keeps up.
    """

    def __init__(self) -> None:
        self._prompts: set[int] = set()  # numbers of those that are counted
        self._num_cached = 0
        self.counts = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of prompt `index`: its tokens are new, its prompt may be known."""
        if index not in self._prompts:
            self._prompts.add(index)
            self.counts["prompt_tokens"] += len(output.prompt_token_ids)
            self.counts["total_tokens"] += len(output.prompt_token_ids)
            self._num_cached += cached_tokens_told(output)
        for completion in output.outputs:
            self.counts["completion_tokens"] += len(completion.token_ids)
            self.counts["total_tokens"] += len(completion.token_ids)

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> UsageCount:
        """Of the finished outputs of all prompts."""
        count = cls()
        for index, output in enumerate(outputs):
            count.add(index, output)
        return count

    def fields(self) -> dict[str, Any]:
        """As answers show it."""
        return {**self.counts, "prompt_tokens_details": {"cached_tokens": self._num_cached}}


class StreamUsage(UsageCount):
    """The counts of a stream, and when it shows them."""

    def __init__(self, options: StreamOptions | None, request: Request) -> None:
        super().__init__()
        self._request = request
        self._in_every_chunk = options is not None and bool(options.continuous_usage_stats)
        self.is_wanted_last = options is not None and bool(options.include_usage)

    def add(self, index: int, output: RequestOutput) -> None:
        """See UsageCount.add; also for the log of a stream that ends anywhere."""
        if not self._prompts:
            self._request.state.usage = self.counts
        super().add(index, output)

    def so_far(self) -> dict[str, Any]:
        """A chunk's `usage`."""
        if self._in_every_chunk:
            return {"usage": self.fields()}
        return {"usage": None} if self.is_wanted_last else {}

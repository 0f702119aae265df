"""The outputs of one request as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm.outputs import RequestOutput


class RequestStream:
    """The outputs of one request, in order; ends after the finished one, or when the request is aborted. Without
    `keeps_all` (deltas) a slow reader gets the newest output only. `changed` (which streams may share) is set with each
    output and at the end. It `is_finished` once its reader has had all of it."""

    def __init__(self, request_id: str, keeps_all: bool, changed: asyncio.Event | None = None) -> None:
        self.request_id = request_id
        self.is_ended = False
        self._keeps_all = keeps_all
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._changed = changed or asyncio.Event()
        self.is_finished = False
        self.observe: Callable[[RequestOutput], None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add the next output, of which an observer is told."""
        if self.observe is not None:
            self.observe(output)
        if not self._keeps_all:
            self._outputs.clear()
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; a reader gets `error` after the outputs, if it is given."""
        self.is_ended = True
        self._error = error
        self._changed.set()

    def take(self) -> list[RequestOutput]:
        """The outputs not taken yet; raises the error that the stream ended with when there are none."""
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self.is_ended:
                self.is_finished = True
                raise StopAsyncIteration if self._error is None else self._error
            self._changed.clear()
            await self._changed.wait()
        output = self._outputs.pop(0)
        self.is_finished = output.finished
        return output

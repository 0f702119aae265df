"""What one request gives, as it comes."""

from __future__ import annotations

import asyncio

from vllm.outputs import RequestOutput


class RequestStream:
    """The outputs of one request, in order: an asynchronous iterator that ends after the finished one, or when the
    request is aborted.

    With CUMULATIVE and FINAL_ONLY outputs a slow reader gets the newest only; deltas are all kept.
    """

    def __init__(self, request_id: str, keeps_all: bool, changed: asyncio.Event | None = None) -> None:
        """
        Args:
            request_id: the request's.
            keeps_all: keep outputs until they are taken; False = the newest one only.
            changed: set when an output has come and at the end; several streams may share it. None = one of its own.
        """
        self.request_id = request_id
        self.is_ended = False
        self._keeps_all = keeps_all
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._changed = changed or asyncio.Event()
        self._finished = False

    def put(self, output: RequestOutput) -> None:
        """Add the next output."""
        if not self._keeps_all:
            self._outputs.clear()
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream: whoever reads on gets the error, if there is one."""
        self.is_ended = True
        self._error = error
        self._changed.set()

    def take(self) -> list[RequestOutput]:
        """The outputs that have come and were not taken yet.

        Raises:
            BaseException: there are none, and the stream has ended with this error.
        """
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self.is_ended:
                self._finished = True
                raise StopAsyncIteration if self._error is None else self._error
            self._changed.clear()
            await self._changed.wait()
        output = self._outputs.pop(0)
        self._finished = output.finished
        return output

"""The engine's requests that one HTTP request stands for, and their end when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

from fastapi import Request

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import RequestStream
from vllm.v1.engine.input_processor import ProcessedPrompt

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Nobody is there to read the answer."""


class Submission:
    """Queued requests, one a prompt."""

    def __init__(self, state: ServerState) -> None:
        self._engine = state.engine
        self._streams: list[RequestStream] = []

    @classmethod
    async def queue(
        cls,
        state: ServerState,
        request_id: str,
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[SamplingParams],
        priority: int = 0,
    ) -> Submission:
        """Queue all prompts.

        Args:
            state: the server's.
            request_id: of the HTTP request; only a part of the engine's ids, which clients cannot make collide.
            prompts: from `engine.process_prompts`.
            params: one a prompt, from `engine.input_processor.process_params`.
            priority: lower runs earlier.

        Raises:
            ApiError: 429 or 503, no room for them.
            VLLMValidationError: a priority that the engine would ignore.
            EngineDeadError: the engine is dead.
        """
        for own in params:
            state.engine.input_processor.check_request(request_id, own, priority)
        state.check_capacity(sum(own.num_sequences for own in params))
        submission = cls(state)
        unique = uuid.uuid4().hex[:8]
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                core_id = f"{request_id}-{unique}-{index}"
                submission._streams.append(await state.engine.add_checked(core_id, prompt, own, priority))
        except BaseException:
            await asyncio.shield(submission.abort())
            raise
        return submission

    async def results(self) -> list[RequestOutput]:
        """The finished output of every prompt, in their order. All end when one fails, or when the caller is
        cancelled.

        Raises:
            ApiError: the model failed on a prompt, or the server stops.
            EngineDeadError: the engine died.
        """
        try:
            return [await self._last(stream) for stream in self._streams]
        except BaseException:
            await asyncio.shield(self.abort())
            raise

    async def events(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, output) of all prompts as they come. All end when one fails, or when the iteration is
        left.

        Raises:
            ApiError, EngineDeadError: as `results`.
        """
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

        async def forward(index: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    queue.put_nowait((index, output))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(forward(*each)) for each in enumerate(self._streams)]
        try:
            finished = [False] * len(tasks)
            num_open = len(tasks)
            while num_open:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                    if not finished[index]:
                        raise _stopped()
                    continue
                _check_errors(item)
                finished[index] = item.finished
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.shield(self.abort())

    async def abort(self) -> None:
        """End what is unfinished."""
        await self._engine.abort([stream.request_id for stream in self._streams])

    async def _last(self, stream: RequestStream) -> RequestOutput:
        last = None
        async for output in stream:
            last = output
        if last is None or not last.finished:
            raise _stopped()
        _check_errors(last)
        return last


def _stopped() -> ApiError:
    return ApiError(503, "the server stopped before the request was done", code="shutting_down", retry_after=10)


def _check_errors(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.error is not None:
            raise ApiError(500, completion.error, code="generation_failed")


def request_id_of(request: Request, prefix: str, given: str | None = None) -> str:
    """The answer's id: what the body gives, else what the X-Request-Id header gives, else a new one."""
    name = given or getattr(request.state, "request_id", None) or uuid.uuid4().hex
    return f"{prefix}-{name}"


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes.

    Args:
        request: whose body has been read.
        work: a coroutine.

    Raises:
        ClientDisconnected: the client went first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""The engine requests of one HTTP request; they are aborted when the client disconnects."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import Request

from vllm.entrypoints.beam_search import Search
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.sampling_params import SamplingParams
from vllm.server.adapter_models import chosen
from vllm.server.errors import ApiError
from vllm.server.http.routes import session
from vllm.server.state import ServerState
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.replica import RequestStream
from vllm.v1.outputs import NO_TOKEN_LEFT

Result = TypeVar("Result")


# So many requests are queued before others get the event loop.
_BURST = 128


class ClientDisconnected(Exception):
    """The client disconnected before its answer was ready."""


class Submission:
    """Queued engine requests, one per prompt."""

    def __init__(self, state: ServerState, request_id: str) -> None:
        self.request_id = request_id
        self._engine = state.engine
        self._streams: list[RequestStream] = []
        self._changed = asyncio.Event()  # set by any stream
        self._generates = False

    @classmethod
    async def queue(
        cls,
        state: ServerState,
        request_id: str,
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[Any],
        priority: int = 0,
        what: str = "n or best_of of each prompt",
    ) -> Submission:
        """Queue all prompts.

        Args:
            request_id: of the HTTP request; engine ids extend it, so that clients cannot make them collide.
            prompts, params: one of each per prompt, from the engine's `process_prompts` and `process_params`:
                SamplingParams, or PoolingParams for outputs of a pooling model.
            what: the sequences are, in an error.

        Raises:
            ApiError: 429 or 503, no room for them.
            VLLMValidationError: a priority that the engine would ignore.
            EngineDeadError: the engine is dead.
        """
        for own in params:
            state.engine.input_processor.check_request(request_id, own, priority)
        # A pooling request is one sequence.
        state.check_capacity(sum(getattr(own, "num_sequences", 1) for own in params), what)
        return await cls.queue_counted(state, request_id, prompts, params, priority)

    @classmethod
    async def queue_counted(
        cls,
        state: ServerState,
        request_id: str,
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[Any],
        priority: int = 0,
    ) -> Submission:
        """`queue` without its checks, for which there is room."""
        if (adapter := chosen.get()) is not None:
            prompts = await state.engine.with_adapters(prompts, [adapter] * len(prompts))
        if (own_session := session.get()) is not None:
            prompts = [replace(prompt, session_id=own_session) for prompt in prompts]
        submission = cls(state, request_id)
        submission._generates = all(getattr(own, "max_tokens", 0) != 0 for own in params)
        _submissions.add(submission)
        unique = uuid.uuid4().hex[:8]
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                core_id = f"{request_id}-{unique}-{index}"
                stream = await state.engine.add_checked(core_id, prompt, own, priority, submission._changed)
                submission._streams.append(stream)
                if index % _BURST == _BURST - 1:
                    await asyncio.sleep(0)
        except BaseException:
            await asyncio.shield(submission.abort())
            raise
        return submission

    async def results(self) -> list[RequestOutput]:
        """The finished output of every prompt, in order. All are aborted when one fails or the caller is cancelled.

        Raises ApiError if the model failed on a prompt or the server stops, EngineDeadError if the engine died.
        """
        try:
            return [await self._last(stream) for stream in self._streams]
        except BaseException:
            await asyncio.shield(self.abort())
            raise

    async def events(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) of all prompts as they come; aborts and raises as `results`."""
        unfinished = dict(enumerate(self._streams))
        try:
            while unfinished:
                await self._changed.wait()
                self._changed.clear()
                for index, stream in tuple(unfinished.items()):
                    for output in stream.take():
                        self._check_errors(output)
                        if output.finished:
                            del unfinished[index]
                        yield index, output
                    if stream.is_ended and index in unfinished:
                        stream.take()  # raises the error that ended it, if any
                        raise _stopped()
        finally:
            await asyncio.shield(self.abort())

    async def abort(self) -> None:
        """Abort unfinished requests."""
        await self._engine.abort([stream.request_id for stream in self._streams], with_output=False)

    @staticmethod
    async def cut_short(state: ServerState, request_ids: Collection[str]) -> None:
        """End the server's unfinished HTTP requests of these ids with what they have; their finish reason is "abort".
        Other ids are ignored."""
        for each in tuple(_submissions):
            if each._engine is state.engine and each.request_id in request_ids:
                await each._engine.abort([stream.request_id for stream in each._streams])

    async def _last(self, stream: RequestStream) -> RequestOutput:
        last = None
        async for output in stream:
            last = output
        if last is None or not last.finished:
            raise _stopped()
        self._check_errors(last)
        return last

    def _check_errors(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        if isinstance(output, PoolingRequestOutput):
            if output.error is not None:
                if output.error.code == "aborted":
                    raise ApiError(503, output.error.message, code="aborted")
                raise ApiError(500, output.error.message, code="pooling_failed")
            return
        for completion in output.outputs:
            check_completion(completion, self._generates)


# As long as anyone waits for them.
_submissions: WeakSet[Submission] = WeakSet()


def _stopped() -> ApiError:
    return ApiError(503, "the server stopped before the request was done", code="shutting_down", retry_after=10)


def check_completion(completion: CompletionOutput, generates: bool) -> None:
    """Raises ApiError if it failed. What was generated (unless only readings were asked for) before its constraints
    left no token is a result."""
    if completion.error is None:
        return
    if completion.stop_reason != NO_TOKEN_LEFT:
        raise ApiError(500, completion.error, code="generation_failed")
    if not generates:
        raise ApiError(400, completion.error, code=NO_TOKEN_LEFT)


def request_id_of(request: Request, prefix: str, given: str | None = None, mark: str = "-") -> str:
    """The prefix, the `mark`, and what is from the body (`given`), else from the X-Request-Id header, else new."""
    name = given or getattr(request.state, "request_id", None) or uuid.uuid4().hex
    return f"{prefix}{mark}{name}"


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects: ClientDisconnected. The request's body must
    have been read."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    # Only the watcher is a task of its own: work that never waits costs no more than a call.
    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise ClientDisconnected from None
    finally:
        watcher.cancel()


class BeamSubmission:
    """A search for each prompt; see Submission. All searches run at once, and a stream gets each result whole."""

    def __init__(self, state: ServerState, searches: list[Search]) -> None:
        self._state = state
        self._searches = searches
        self._tasks: list[asyncio.Task[RequestOutput]] = []

    @classmethod
    async def queue(
        cls,
        state: ServerState,
        request_id: str,
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[SamplingParams],
        priority: int,
    ) -> BeamSubmission:
        """Begin a search for each prompt; see Submission.queue."""
        searches = [
            Search(f"{request_id}-{index}", prompt, own, priority, state.engine, returns_logprobs=False)
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        for search in searches:
            state.engine.input_processor.check_request(request_id, search.query_params, priority)
        state.check_capacity(sum(own.num_sequences for own in params))
        return cls(state, searches)

    async def results(self) -> list[RequestOutput]:
        try:
            return [output async for _, output in self.events()]
        finally:
            await asyncio.shield(self.abort())

    async def events(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        self._tasks = [asyncio.create_task(self._run(search)) for search in self._searches]
        try:
            for index, task in enumerate(self._tasks):
                yield index, await task
        finally:
            await asyncio.shield(self.abort())

    async def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, search: Search) -> RequestOutput:
        while not search.is_over:
            names, prompts = search.next_queries()
            params = [search.query_params] * len(prompts)
            step = await Submission.queue_counted(self._state, search.request_id, prompts, params, search.priority)
            for name, output in zip(names, await step.results(), strict=True):
                search.take(name, output)
            search.advance()
        output = search.output(self._state.engine.input_processor.tokenizer)
        for completion in output.outputs:
            check_completion(completion, generates=True)
        return output

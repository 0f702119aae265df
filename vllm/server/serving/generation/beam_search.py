"""Beam searches of an HTTP request, in the place of its engine requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from vllm.entrypoints.beam_search import Search
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.server.serving.engine_requests import Submission, check_completion
from vllm.server.state import ServerState
from vllm.v1.engine.input_processor import ProcessedPrompt


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

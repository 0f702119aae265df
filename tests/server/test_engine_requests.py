"""Several prompts' streams as one, and how it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from vllm.exceptions import EngineDeadError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_outputs import PoolingOutput, PoolingRequestOutput, RequestError
from vllm.sampling_params import SamplingParams
from vllm.server.errors import ApiError
from vllm.server.serving.engine_requests import Submission
from vllm.v1.engine.replica import RequestStream


class Engine:
    """Takes requests and leaves their streams to the test."""

    def __init__(self) -> None:
        self.streams: list[RequestStream] = []
        self.aborted: list[str] = []
        self.input_processor = SimpleNamespace(check_request=lambda *_: None)

    async def add_checked(self, request_id, prompt, params, priority, changed) -> RequestStream:
        self.streams.append(RequestStream(request_id, True, changed))
        return self.streams[-1]

    async def abort(self, request_ids, with_output=True) -> None:
        self.aborted += request_ids


def output(text: str, finished: bool = False, error: str | None = None) -> RequestOutput:
    reason = "error" if error else "length" if finished else None
    completion = CompletionOutput(0, text, [1], finish_reason=reason, error=error)
    return RequestOutput("r", None, [1], outputs=[completion], finished=finished)


async def texts_of(submission: Submission, seen: list[tuple[int, str]]) -> None:
    async for index, each in submission.events():
        seen.append((index, each.outputs[0].text))


def run(play) -> None:
    """`play(engine, task, seen)` with a submission of two prompts that `task` reads."""

    async def main() -> None:
        engine = Engine()
        state = SimpleNamespace(engine=engine, check_capacity=lambda *_: None)
        submission = await Submission.queue(state, "r", [None, None], [SamplingParams()] * 2)
        seen: list[tuple[int, str]] = []
        await play(engine, asyncio.create_task(texts_of(submission, seen)), seen)
        assert engine.aborted == [stream.request_id for stream in engine.streams]

    asyncio.run(main())


def test_outputs_come_from_all_prompts_until_each_is_finished():
    async def play(engine, task, seen):
        first, second = engine.streams
        second.put(output("a"))
        await asyncio.sleep(0)
        first.put(output("b"))
        second.put(output("c", finished=True))
        await asyncio.sleep(0.01)
        assert sorted(seen) == [(0, "b"), (1, "a"), (1, "c")] and not task.done()
        first.put(output("d", finished=True))
        await task
        assert seen[-1] == (0, "d")

    run(play)


@pytest.mark.parametrize(("error", "raised"), [(EngineDeadError("gone"), EngineDeadError), (None, ApiError)])
def test_an_early_end_comes_after_what_was_there(error, raised):
    async def play(engine, task, seen):
        engine.streams[0].put(output("a"))
        engine.streams[0].end(error)
        with pytest.raises(raised):
            await task
        assert seen == [(0, "a")]

    run(play)


def test_a_failed_prompt_ends_all():
    async def play(engine, task, seen):
        engine.streams[1].put(output("", finished=True, error="no memory"))
        with pytest.raises(ApiError, match="no memory"):
            await task
        assert seen == []

    run(play)


def test_whoever_leaves_early_ends_all():
    async def play(engine, task, seen):
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(play)


def test_a_pooled_request_that_was_aborted_says_so():
    async def play(engine, task, seen):
        error = RequestError("aborted", "the request was aborted", retryable=True)
        nothing = PoolingOutput(torch.empty(0))
        engine.streams[0].put(PoolingRequestOutput("r", nothing, [1], 0, True, error=error))
        with pytest.raises(ApiError, match="was aborted") as raised:
            await task
        assert (raised.value.status, raised.value.code) == (503, "aborted")

    run(play)

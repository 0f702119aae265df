"""How an endpoint that generates answers: from queued prompts to JSON, or to a stream of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from vllm.entrypoints.openai.http.streaming import EventStream
from vllm.entrypoints.openai.rendering.written_json import PartsResponse
from vllm.entrypoints.openai.serving.engine_requests import Submission, while_connected
from vllm.outputs import RequestOutput


class Answer(Protocol):
    """One request's way from its body to its answer."""

    async def submit(self) -> Submission:
        """Check everything and queue it."""

    async def whole(self, outputs: list[RequestOutput], request: Request) -> Any:
        """The answer from the finished output of each prompt."""

    def chunks(self, submission: Submission, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes."""


async def respond(request: Request, answer: Answer, stream: bool) -> Response:
    """Generate and answer, while the client is there.

    Args:
        request: whose body has been read.
        answer: what it asks for.
        stream: send chunks as they come.

    Raises:
        ApiError, VLLMValidationError, EngineDeadError: the request cannot be honoured, or the model failed on it.
        ClientDisconnected: nobody waits any more.
    """
    if stream:
        submission = await while_connected(request, answer.submit())
        return EventStream(answer.chunks(submission, request), submission.abort)
    return PartsResponse(await while_connected(request, _whole(request, answer)))


async def _whole(request: Request, answer: Answer) -> Any:
    submission = await answer.submit()
    return await answer.whole(await submission.results(), request)

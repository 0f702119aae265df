"""Answers of generation endpoints, whole or streamed."""

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
    """A generation request on its way from body to answer."""

    async def submit(self) -> Submission:
        """Check everything and queue it."""

    async def whole(self, outputs: list[RequestOutput], request: Request) -> Any:
        """The answer, from the finished output of each prompt."""

    def chunks(self, submission: Submission, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer."""


async def respond(request: Request, answer: Answer, stream: bool) -> Response:
    """Generate and answer; aborts when the client disconnects.

    Raises:
        ApiError, VLLMValidationError, EngineDeadError: the request cannot be honoured, or the model failed on it.
        ClientDisconnected: the client went first.
    """
    if stream:
        submission = await while_connected(request, answer.submit())
        return EventStream(answer.chunks(submission, request), submission.abort)

    async def whole() -> Any:
        submission = await answer.submit()
        return await answer.whole(await submission.results(), request)

    return PartsResponse(await while_connected(request, whole()))

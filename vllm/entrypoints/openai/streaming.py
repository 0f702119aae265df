"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import as_api_error
from vllm.logger import init_logger

logger = init_logger(__name__)

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each chunk as it comes; ends the source when the client goes.

    An error after the first chunk is an event of its own, in the shape of every error, before the end.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Any, None], release: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            chunks: what msgspec can encode, one an event.
            release: gives back what they are made from, however far they came: a generator that nobody has begun to
                read would not.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(receive, send)
        finally:
            await asyncio.shield(self._release())

    async def _answer(self, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks), anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await self._send(send, b"data: " + msgspec.json.encode(chunk) + b"\n\n")
            except Exception as error:
                answer = as_api_error(error)
                if answer.code == "internal_error":
                    logger.exception("a stream failed")
                await self._send(send, b"data: " + msgspec.json.encode(answer.body()) + b"\n\n")
            await self._send(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()

    @staticmethod
    async def _send(send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.logger import init_logger
from vllm.server.errors import as_api_error
from vllm.server.rendering.written_json import encode_parts, send_parts

logger = init_logger(__name__)

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each chunk as it comes and closes their source when the client disconnects. An error is an event, too."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Any, None], release: Callable[[], Awaitable[None]]) -> None:
        """`release` frees what `chunks` reads from: closing a generator that never started runs none of its code."""
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
                    await _send_event(send, chunk)
            except Exception as error:
                answer = as_api_error(error)
                if answer.code == "internal_error":
                    logger.exception("a stream failed")
                await _send_event(send, answer.body())
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
            group.cancel_scope.cancel()


async def _send_event(send: Send, chunk: Any) -> None:
    first, *rest = encode_parts(chunk)
    parts = [b"data: " + first, *rest]
    parts[-1] += b"\n\n"
    await send_parts(send, parts, more_body=True)

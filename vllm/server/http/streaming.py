"""Answers that are sent as they come: server-sent events, and bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.logger import init_logger
from vllm.server.errors import DONE, as_api_error
from vllm.server.rendering.written_json import encode_parts, send_parts

logger = init_logger(__name__)


class _LiveStream(Response):
    """Sends pieces as they come and closes their source when the client disconnects."""

    def __init__(self, pieces: AsyncGenerator[Any, None], release: Callable[[], Awaitable[None]]) -> None:
        """`release` frees what `pieces` reads from: closing a generator that never started runs none of its code."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(receive, send)
        finally:
            await asyncio.shield(self._release())

    async def _answer(self, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        async with aclosing(self._pieces), anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                await self._send_all(send)
            except Exception as error:
                failure = error  # the group would wrap it
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _send_all(self, send: Send) -> None:
        raise NotImplementedError

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class EventStream(_LiveStream):
    """Chunks as server-sent events. An error is an event, too."""

    media_type = "text/event-stream"

    async def _send_all(self, send: Send) -> None:
        await self._start(send)
        try:
            async for chunk in self._pieces:
                await _send_event(send, chunk)
        except Exception as error:
            answer = as_api_error(error)
            if answer.code == "internal_error":
                logger.exception("a stream failed")
            await _send_event(send, answer.body())
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


class NamedEventStream(_LiveStream):
    """Events that have names, their `type`, of a source that makes events of its errors, too; there is no [DONE]."""

    media_type = "text/event-stream"

    async def _send_all(self, send: Send) -> None:
        await self._start(send)
        async for event in self._pieces:
            await _send_event(send, event, b"event: " + event["type"].encode() + b"\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ByteStream(_LiveStream):
    """Bytes. An error before the first is answered as any other; a later one leaves the body without its end."""

    def __init__(
        self, pieces: AsyncGenerator[Any, None], release: Callable[[], Awaitable[None]], media_type: str
    ) -> None:
        self.media_type = media_type
        super().__init__(pieces, release)

    async def _send_all(self, send: Send) -> None:
        first = await anext(self._pieces)
        await self._start(send)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, chunk: Any, name: bytes = b"") -> None:
    first, *rest = encode_parts(chunk)
    parts = [name + b"data: " + first, *rest]
    parts[-1] += b"\n\n"
    await send_parts(send, parts, more_body=True)

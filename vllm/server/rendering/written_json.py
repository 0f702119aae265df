"""JSON in parts: wide rows are made and sent a millisecond or two at a time, to keep the event loop responsive."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ENTRIES_PER_TURN = 2048
"""Entries of rows that take one or two milliseconds to write."""

# No JSON text contains it.
_PLACE = b"\0"


@lru_cache(maxsize=4)
def _lock(loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
    return asyncio.Lock()


async def turn() -> None:
    """Wait until the caller may work for a millisecond or two, up to its next await. Only one caller returns in each
    iteration of the event loop, so that pieces of several requests do not add up."""
    async with _lock(asyncio.get_running_loop()):
        await asyncio.sleep(0)


class Written:
    """A JSON value as text in parts, which are never copied together."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts


def encode_parts(content: Any) -> list[bytes]:
    """The JSON text, in parts, of anything that msgspec can encode, with Written values inside."""
    written: list[Written] = []

    def take(value: Any) -> msgspec.Raw:
        if not isinstance(value, Written):
            raise TypeError(f"{type(value).__name__} is no JSON")
        written.append(value)
        return msgspec.Raw(_PLACE)

    text = msgspec.json.encode(content, enc_hook=take)
    if not written:
        return [text]
    first, *rest = text.split(_PLACE)
    parts = [first]
    for value, after in zip(written, rest, strict=True):
        parts += [*value.parts, after]
    return parts


class PartsResponse(Response):
    """A JSON answer, sent in the parts of `encode_parts`."""

    media_type = "application/json"

    def __init__(self, content: Any) -> None:
        self._parts = encode_parts(content)
        super().__init__(headers={"Content-Length": str(sum(map(len, self._parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_parts(send, self._parts, more_body=False)


async def send_parts(send: Send, parts: list[bytes], more_body: bool) -> None:
    """Send parts of a body. `more_body`: it goes on after them."""
    for number, part in enumerate(parts, start=1):
        if number > 1:
            await turn()
        await send({"type": "http.response.body", "body": part, "more_body": more_body or number < len(parts)})

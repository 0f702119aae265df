"""JSON that is written where it is made, in parts which nobody copies together: rows as wide as a vocabulary."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.rendering.turns import turn

# No JSON text contains it.
_PLACE = b"\0"


class Written:
    """A JSON value that is written already, in parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts


def encode_parts(content: Any) -> list[bytes]:
    """The JSON text of what msgspec can encode, and of Written values in it, as parts to be sent in their order."""
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
    """A JSON answer that is sent in parts, between which the event loop goes round."""

    media_type = "application/json"

    def __init__(self, content: Any) -> None:
        """
        Args:
            content: see encode_parts.
        """
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

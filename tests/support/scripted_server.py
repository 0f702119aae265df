"""An HTTP server in this process whose answers a test decides, down to the bytes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass
class Request:
    """A client's request, and how many requests its connection had before."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    number_on_connection: int
    writer: asyncio.StreamWriter = field(repr=False)


Handler = Callable[[Request], Awaitable[bytes]]


def answer(content: Any, status: int = 200, **headers: str) -> bytes:
    """A whole answer with a length."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def refusal(status: int, message: str, param: str | None = None, **headers: str) -> bytes:
    """An error as the server words it."""
    return answer({"error": {"message": message, "type": "some", "param": param, "code": None}}, status, **headers)


def chunked(*pieces: bytes) -> bytes:
    """An answer in chunks."""
    body = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def events(*contents: Any) -> bytes:
    """A stream of server-sent events with [DONE]."""
    lines = [f"data: {json.dumps(content)}\n\n".encode() for content in contents]
    return chunked(*lines, b"data: [DONE]\n\n")


class ScriptedServer:
    """Listens on a free port of 127.0.0.1 in a thread until the context is left.

    Args:
        handler: gives the bytes to answer a request with; empty bytes close the connection.

    Attributes:
        url: where it listens.
        requests: all that came.
        num_open: requests that are being handled; max_open: the most at once.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        self.num_open = self.max_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.url = ""

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = starting.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number = 0
            while request := await _read(reader, writer, number):
                number += 1
                self.requests.append(request)
                self.num_open += 1
                self.max_open = max(self.max_open, self.num_open)
                try:
                    data = await self._handler(request)
                finally:
                    self.num_open -= 1
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Request | None:
    first = (await reader.readline()).decode()
    if not first:
        return None
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, json.loads(body) if body else None, number, writer)

"""An application of a caller's own: served, and its handlers cancelled when their clients are gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

fastapi = pytest.importorskip("fastapi")


async def request(port: int, wait: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{wait} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


async def run() -> list[str]:
    app, seen, begun = fastapi.FastAPI(), [], asyncio.Event()

    @with_cancellation
    async def answer(wait: str, raw_request: fastapi.Request) -> Any:
        begun.set()
        try:
            await asyncio.sleep(60 if wait == "long" else 0)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return {"waited": wait}

    async def route(wait: str, raw_request: fastapi.Request) -> Any:
        return await answer(wait, raw_request=raw_request)

    # Not by the decorator: annotations of a function's locals are not found by their names.
    route.__annotations__ = {"wait": str, "raw_request": fastapi.Request}
    app.get("/{wait}")(route)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = asyncio.create_task(serve_http(app, listener, log_level="error"))
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                reader, writer = await request(port, "short")
                break
            await asyncio.sleep(0.02)
        seen.append((await reader.read()).decode().rpartition("\r\n\r\n")[2])
        writer.close()
        begun.clear()
        _, writer = await request(port, "long")
        await begun.wait()
        writer.close()
        while len(seen) < 2:
            await asyncio.sleep(0.02)
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await server)
    return seen


def test_an_application_of_a_caller() -> None:
    assert asyncio.run(asyncio.wait_for(run(), 60)) == ['{"waited":"short"}', "cancelled"]

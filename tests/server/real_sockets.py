"""The application behind a real socket of the test's own event loop, and clients that leave as they like."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from asgi import server_args

from vllm import AsyncLLM
from vllm.server.app import build_app
from vllm.server.state import ServerState

PATIENCE = 20.0
"""Seconds after which a test gives up on what should be so at once."""

_DONE = b"data: [DONE]\n"


class SocketServer:
    """A server that listens on 127.0.0.1.

    Attributes:
        port: where.
        state: its state, with the engine.
    """

    def __init__(self, state: ServerState, port: int) -> None:
        self.state = state
        self.port = port

    async def leftovers(self) -> dict[str, Any]:
        """All that the server, the engine and its core hold for requests, by name; empty when that is nothing."""
        engine = self.state.engine
        # Its process answers between two steps, after everything that it was sent before.
        core = await engine.replicas[0].core.call("stats")
        held = {
            "answers": len(self.state.in_flight),
            "requests": engine.num_unfinished_requests,
            "sequences": engine.num_unfinished_sequences,
            "streams": sum(len(each.streams) for each in engine.replicas),
            **{name: core[name] for name in ("num_running", "num_waiting", "kv_cache_usage")},
        }
        return {name: value for name, value in held.items() if value}

    async def empty(self) -> None:
        """Wait until nothing is left."""
        left: dict[str, Any] = {}
        for _ in range(int(PATIENCE / 0.02)):
            left = await self.leftovers()
            if not left:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"left after {PATIENCE} s: {left}")

    async def until(self, name: str, least: float) -> None:
        """Wait until as much is held under `name`."""
        for _ in range(int(PATIENCE / 0.005)):
            if (await self.leftovers()).get(name, 0) >= least:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{name} never came to {least}: {await self.leftovers()}")


@asynccontextmanager
async def listening(engine: AsyncLLM, **args: Any) -> AsyncIterator[SocketServer]:
    """A server over `engine`; `args` are ServerArgs."""
    state = ServerState(engine, server_args(**{"access_log": False, **args}))
    config = uvicorn.Config(
        build_app(state), http="httptools", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        try:
            yield SocketServer(state, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


class RawClient:
    """One request over one connection, byte by byte, or one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def send(
        cls, port: int, path: str, body: dict[str, Any], share: float = 1.0, accept: str = "*/*"
    ) -> RawClient:
        """Connect and send the request's head and the first `share` of its body."""
        client = await cls.connect(port)
        await client.write(path, body, share, accept)
        return client

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        """A connection without a request."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def write(self, path: str, body: dict[str, Any], share: float = 1.0, accept: str = "*/*") -> None:
        """Send a request's head and the first `share` of its body."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
            f"Content-Length: {len(data)}\r\n"
        )
        self._writer.write(head.encode() + b"\r\n" + data[: int(share * len(data))])
        await self._writer.drain()

    async def read_events(self, count: int) -> None:
        """Read until `count` events of the answer have come, or its last one."""
        while count:
            line = await self._reader.readline()
            assert b"application/json" not in line, "an answer without events"
            if line in (b"", _DONE):
                return
            count -= line.startswith(b"data: ")

    async def reads(self, part: bytes) -> bool:
        """Read lines until one holds `part`; False: the answer has ended before."""
        while (line := await self._reader.readline()) not in (b"", _DONE):
            assert b"application/json" not in line, await self._reader.read(2000)
            if part in line:
                return True
        return False

    async def read_rest(self) -> bytes:
        """The rest of a stream, in its chunks."""
        return await self._reader.readuntil(b"\r\n0\r\n\r\n")

    async def read_some(self) -> bytes:
        """The next bytes."""
        return await self._reader.read(1)

    async def read_to_end(self) -> None:
        """Read events until the last one."""
        while await self._reader.readline() not in (b"", _DONE):
            pass

    async def answer(self) -> Any:
        """The answer's JSON."""
        return json.loads(await self.whole_answer())

    async def whole_answer(self) -> bytes:
        """The answer's body; of a stream its chunks, as they were sent."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = re.search(rb"content-length: (\d+)", head)
        if length is None:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return await self._reader.readexactly(int(length[1]))

    async def leave(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    def leave_abruptly(self) -> None:
        """Reset the connection, as when the client's process or machine dies."""
        own = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def fall_silent(self) -> None:
        """Close the sending half, read what may still come, and close the rest."""
        self._writer.write_eof()
        try:
            await self._reader.read()
        finally:
            await self.leave()

"""A server's JSON answers and event streams, over HTTP/1.1 connections that are kept for the next request."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Self

from vllm.exceptions import CliError
from vllm.version import __version__

Result = TypeVar("Result")

# Seconds before each retry, about a minute in all: enough for a server to restart.
RETRY_DELAYS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
LONGEST_WAIT = 120
_PASSING = (429, 502, 503, 504)
_PIECE = 2**16
API_KEY = "VLLM_API_KEY"
TIMEOUT = 600.0
"""Longest wait for any data from a server, in seconds."""


class ServerError(CliError):
    """No response, or an error response.

    Attributes:
        status: HTTP status; None without a response.
        message: the server's message, or why there is no response.
        param: the request's field at fault, if named.
        retry_after: seconds of the Retry-After header, if any.
    """

    def __init__(
        self,
        where: str,
        message: str,
        status: int | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(f"{where}: {message}" if status is None else f"{where} answered {status}: {message}")
        self.message = message
        self.status = status
        self.param = param
        self.retry_after = retry_after

    @property
    def may_pass(self) -> bool:
        """Whether the same request can succeed later."""
        return self.status is None or self.status in _PASSING


class ServerClient:
    """Requests to one server, any number at once, each on its own connection. Every method raises ServerError."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 600.0,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """
        Args:
            url: http(s)://HOST[:PORT][/PREFIX].
            timeout: longest wait for any part of a response, in seconds.
            headers: further ones of every request.

        Raises:
            CliError: not such a URL, or a key that a header cannot hold.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise CliError(f"--url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
            raise CliError(f"--url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise CliError("the API key has characters that no HTTP header can hold")
        self._host = parts.hostname
        self._secure = parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        # OpenAI's clients take the URL with /v1.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._timeout = timeout
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        if not all(text.isascii() and text.isprintable() for pair in headers for text in pair):
            raise CliError("--header has characters that no HTTP header can hold")
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._headers = f"Host: {parts.netloc}\r\nUser-Agent: vllm/{__version__}\r\n{key}{more}"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Any:
        """The JSON response to a GET."""
        return await self._fetch("GET", path, b"")

    async def text(self, path: str) -> str:
        """The response to a GET, whatever it is."""
        return (await self._data("GET", path, b"")).decode(errors="replace")

    async def post(self, path: str, body: Any) -> Any:
        """The JSON response to a POST of `body` as JSON."""
        return await self._fetch("POST", path, json.dumps(body).encode())

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event in the response to a POST, up to [DONE]."""
        where = f"{self.url}{path}"
        async with _Answer(self, where, await self._send("POST", path, json.dumps(body).encode())) as answer:
            rest = b""
            async for piece in answer.connection.body():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        answer.is_done = True  # read on to the end of the body, so that the connection can be reused
                        continue
                    if data.startswith(b'{"error"'):
                        raise _refusal(where, 500, data, None)
                    yield data
            if not answer.is_done:
                raise ServerError(where, "the stream ended before its time")

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    def keep(self, connection: _Connection) -> None:
        """Keep a connection whose response was read for a later request."""
        self._idle.append(connection)

    async def _fetch(self, method: str, path: str, body: bytes) -> Any:
        data = await self._data(method, path, body)
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise ServerError(f"{self.url}{path}", "the answer is not JSON") from None

    async def _data(self, method: str, path: str, body: bytes) -> bytes:
        async with _Answer(self, f"{self.url}{path}", await self._send(method, path, body)) as answer:
            data = b"".join([piece async for piece in answer.connection.body()])
            answer.is_done = True
        return data

    async def _send(self, method: str, path: str, body: bytes) -> _Connection:
        """A connection on which the head of a 200 response has been read."""
        where = f"{self.url}{path}"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        request = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode() + body
        while True:
            is_old = bool(self._idle)
            connection = None
            try:
                connection = self._idle.pop() if is_old else await self._connect()
                await connection.exchange(request)
            except (OSError, EOFError, ValueError) as error:
                if connection is not None:
                    connection.abort()
                # The server may have closed an idle connection.
                if is_old and not isinstance(error, TimeoutError):
                    continue
                raise _no_answer(where, error) from None
            except BaseException:
                if connection is not None:
                    connection.abort()
                raise
            if connection.status == 200:
                return connection
            async with _Answer(self, where, connection) as answer:
                data = b"".join([piece async for piece in connection.body()])
                answer.is_done = True
            raise _refusal(where, connection.status, data, connection.headers.get("retry-after"))

    async def _connect(self) -> _Connection:
        context = None
        if self._secure:
            import ssl

            context = ssl.create_default_context()
        opening = asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            reader, writer = await asyncio.wait_for(opening, self._timeout)
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            raise TimeoutError from None
        return _Connection(reader, writer, self._timeout)


@dataclass
class _Answer:
    """The reading of a response: afterwards its connection returns to the client if all was read, else is closed."""

    client: ServerClient
    where: str
    connection: _Connection
    is_done: bool = False

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self.is_done and self.connection.stays_open:
            self.client.keep(self.connection)
        else:
            self.connection.abort()
        if isinstance(error, (OSError, EOFError, ValueError)):
            raise _no_answer(self.where, error) from None


@dataclass
class _Connection:
    """A connection for consecutive requests. Raises OSError, EOFError or ValueError."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    timeout: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    stays_open: bool = False
    _timed_out: bool = False
    _received: bytearray = field(default_factory=bytearray)  # and not yet read

    async def exchange(self, request: bytes) -> None:
        """Send a request and read the head of its response."""
        self.writer.write(request)
        await self._timed(self.writer.drain)
        status_line = await self._line()
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("the answer is not HTTP")
        self.status = int(rest[:3])
        self.headers = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        self.stays_open = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"

    async def body(self) -> AsyncIterator[bytes]:
        """The response's body as it arrives."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._line()).partition(";")[0], 16):
                yield (await self._exactly(size + 2))[:-2]
            while await self._line():
                pass
        elif "content-length" in self.headers:
            yield await self._exactly(int(self.headers["content-length"]))
        else:
            self.stays_open = False
            while self._received or await self._receive():
                yield await self._exactly(len(self._received))

    def abort(self) -> None:
        """Close without waiting."""
        self.writer.transport.abort()

    async def _line(self) -> str:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _PIECE:
                raise ValueError("a line of the answer's head is too long")
            await self._receive_more()
        return (await self._exactly(end + 1)).decode("latin-1").rstrip("\r\n")

    async def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            await self._receive_more()
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def _receive_more(self) -> None:
        if not await self._receive():
            raise EOFError("the server closed the connection")

    async def _receive(self) -> bool:
        """Wait for data; False if the server has closed the connection."""
        piece: bytes = await self._timed(lambda: self.reader.read(_PIECE))
        self._received += piece
        return bool(piece)

    async def _timed(self, reading: Callable[[], Awaitable[Result]]) -> Result:
        timer = asyncio.get_running_loop().call_later(self.timeout, self._time_out)
        try:
            result = await reading()
        except (OSError, EOFError) as error:
            raise self._lost() from error
        finally:
            timer.cancel()
        if self._timed_out:
            raise self._lost()
        return result

    def _time_out(self) -> None:
        self._timed_out = True
        self.abort()

    def _lost(self) -> Exception:
        if self._timed_out:
            return TimeoutError()
        return EOFError("the server closed the connection")


async def with_retries(call: Callable[[], Awaitable[Result]]) -> Result:
    """The result of `call`, repeated after RETRY_DELAYS while the server is overloaded, starting or unreachable.

    Raises:
        ServerError: another error, a Retry-After above LONGEST_WAIT, or the last attempt's error.
    """
    for delay in RETRY_DELAYS:
        try:
            return await call()
        except ServerError as error:
            if not error.may_pass or (error.retry_after or 0) > LONGEST_WAIT:
                raise
            # Jitter, so that requests refused together are not repeated together.
            await asyncio.sleep(max(delay, error.retry_after or 0.0) * random.uniform(1.0, 1.25))
    return await call()


def _no_answer(where: str, error: Exception) -> ServerError:
    if isinstance(error, TimeoutError):
        return ServerError(where, "no answer in time (--timeout)")
    if isinstance(error, ConnectionError) and error.errno is not None:
        return ServerError(where, f"no answer: {os.strerror(error.errno)}")
    return ServerError(where, f"no answer: {error or type(error).__name__}")


def _refusal(where: str, status: int, data: bytes, retry_after: str | None) -> ServerError:
    message, param = data[:200].decode(errors="replace").strip() or "nothing further", None
    try:
        error = json.loads(data)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not a server of this kind, or a proxy in front of it
    seconds = int(retry_after) if retry_after is not None and retry_after.isdigit() else None
    return ServerError(where, message, status, param, seconds)


def connect(args: argparse.Namespace, headers: Sequence[tuple[str, str]] = ()) -> ServerClient:
    """A client of --url, with further headers; raises CliError as ServerClient."""
    key = args.api_key if args.api_key is not None else os.environ.get(API_KEY)
    return ServerClient(args.url, key or None, args.timeout or TIMEOUT, headers)


async def wait_ready(client: ServerClient, seconds: float) -> None:
    """Wait until the server answers, or the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while loop.time() < deadline:
        try:
            await client.get("/v1/models")
            return
        except ServerError as error:
            if not error.may_pass:
                return
        await asyncio.sleep(0.1)


async def served_model(client: ServerClient, name: str | None) -> dict[str, Any]:
    """The server's description (`id`, `max_model_len` ...) of the model `name`; None or empty = its first.

    Raises:
        CliError: no server, or no such model.
    """
    answer = await client.get("/v1/models")
    try:
        models = {card["id"]: card for card in answer["data"]}
    except (KeyError, TypeError):
        models = {}
    if not models:
        raise CliError(f"{client.url}/v1/models: the answer names no model")
    if name and name not in models:
        raise CliError(f"--model: there is no {name!r} at {client.url}; there is {', '.join(map(repr, models))}")
    card: dict[str, Any] = models[name] if name else next(iter(models.values()))
    return card


class ServerSession:
    """A model at --url, for synchronous callers. A context manager, which disconnects.

    Attributes:
        card: the server's description of the model; see `served_model`.
        model_name: the server's name for it.

    Raises:
        CliError: there is no server, or no such model.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.client = connect(args)
        self.loop = asyncio.new_event_loop()
        try:
            self.card = self.wait(self.describe(args.model))
        except BaseException:
            self.loop.close()
            raise
        self.model_name: str = self.card["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Ends a stream that an exception left open.
        self.wait(self.loop.shutdown_asyncgens())
        self.wait(self.client.close())
        self.loop.close()

    async def describe(self, name: str | None) -> dict[str, Any]:
        """The server's description of the model `name`; see `served_model`."""
        return await served_model(self.client, name)

    def wait(self, work: Awaitable[Result]) -> Result:
        """The result of `work`."""
        return self.loop.run_until_complete(work)

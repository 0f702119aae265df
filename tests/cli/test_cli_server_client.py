"""The client of the commands that talk to a server: HTTP, event streams, faults, retries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from scripted_server import Handler, Request, ScriptedServer, answer, chunked, events, refusal

from vllm.exceptions import CliError
from vllm.utils import server_client
from vllm.utils.server_client import ServerClient, ServerError, with_retries


def always(*answers: bytes) -> Handler:
    """These answers one after another, the last one for ever."""
    left = list(answers)

    async def handle(request: Request) -> bytes:
        return left.pop(0) if len(left) > 1 else left[0]

    return handle


def talk(
    handler: Handler, use: Callable[[ServerClient], Coroutine[Any, Any, Any]], **options: Any
) -> tuple[Any, list[Request]]:
    """The result of `use` for a client of such a server, and the requests that came."""

    async def run(url: str) -> Any:
        client = ServerClient(url, **{"timeout": 20.0, **options})
        try:
            return await use(client)
        finally:
            await client.close()

    with ScriptedServer(handler) as server:
        return asyncio.run(run(server.url)), server.requests


def fails(handler: Handler, **options: Any) -> ServerError:
    with pytest.raises(ServerError) as raised:
        talk(handler, lambda client: client.get("/x"), **options)
    return raised.value


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time."""
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        seen.append(seconds)

    monkeypatch.setattr(server_client.asyncio, "sleep", sleep)
    monkeypatch.setattr(server_client.random, "uniform", lambda low, high: low)
    return seen


def test_requests_follow_each_other_on_one_connection() -> None:
    async def use(client: ServerClient) -> list[Any]:
        return [await client.post("/a", {"text": "é\ud800"}), await client.get("/b"), await client.post("/a", [])]

    answers, requests = talk(always(answer({"n": 1}), chunked(b'{"n"', b": 2}"), answer(b"")), use, api_key="sesame")
    assert answers == [{"n": 1}, {"n": 2}, None]
    assert [(r.method, r.path, r.body) for r in requests] == [
        ("POST", "/a", {"text": "é\ud800"}),
        ("GET", "/b", None),
        ("POST", "/a", []),
    ]
    assert [r.number_on_connection for r in requests] == [0, 1, 2]
    assert all(r.headers["authorization"] == "Bearer sesame" for r in requests)


def test_a_connection_that_the_server_closed_in_between_is_replaced() -> None:
    async def handle(request: Request) -> bytes:
        return b"" if request.number_on_connection else answer({})

    async def use(client: ServerClient) -> None:
        for _ in range(3):
            await client.get("/x")

    _, requests = talk(handle, use)
    assert [r.number_on_connection for r in requests] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "head", ["HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2", "HTTP/1.0 200 OK", "HTTP/1.1 200 OK"]
)
def test_a_connection_that_does_not_stay_open_is_not_used_again(head: str) -> None:
    async def handle(request: Request) -> bytes:
        request.writer.write(f"{head}\r\n\r\n{{}}".encode())
        return b""

    async def use(client: ServerClient) -> list[Any]:
        return [await client.get("/x"), await client.get("/x")]

    answers, requests = talk(handle, use)
    assert answers == [{}, {}] and [r.number_on_connection for r in requests] == [0, 0]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_come_whole_however_the_bytes_are_cut(size: int) -> None:
    long = "x" * 200_000
    body = f'data: {{"n": 1}}\n\n: a comment\r\ndata: {{"long": "{long}"}}\r\n\r\ndata: [DONE]\n\n'.encode()
    size = max(size, len(body) // 1000) if size > 1 else size
    pieces = [body[:20], *(body[i : i + size] for i in range(20, len(body), size))] if size > 1 else [body]

    async def use(client: ServerClient) -> list[bytes]:
        return [data async for data in client.events("/s", {})] + [await client.get("/x")]

    found, requests = talk(always(chunked(*pieces), answer({})), use)
    assert found == [b'{"n": 1}', f'{{"long": "{long}"}}'.encode(), {}]
    assert [r.number_on_connection for r in requests] == [0, 1]


def test_an_error_inside_a_stream_and_a_stream_that_breaks_off() -> None:
    async def use(client: ServerClient) -> None:
        async for data in client.events("/s", {}):
            assert data == b'{"n": 1}'

    stream = events({"n": 1})
    broken = {
        chunked(b'data: {"n": 1}\n\ndata: {"error": {"message": "it burst", "param": null}}\n\n'): "it burst",
        chunked(b'data: {"n": 1}\n\n'): "the stream ended before its time",
        stream[: stream.index(b"data: [DONE]")]: "no answer: the server closed the connection",
    }
    for data, message in broken.items():

        async def handle(request: Request, data: bytes = data) -> bytes:
            request.writer.write(data)
            return b""

        with pytest.raises(ServerError, match=message):
            talk(handle, use)


def test_leaving_a_stream_closes_its_connection() -> None:
    closed: list[bool] = []

    async def handle(request: Request) -> bytes:
        request.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\ndata: 1\n\r\n")
        for _ in range(1000):
            if request.writer.transport.is_closing():
                closed.append(True)
                break
            request.writer.write(b"8\r\ndata: 2\n\r\n")
            await asyncio.sleep(0.01)
        return b""

    async def use(client: ServerClient) -> None:
        stream = client.events("/s", {})
        assert await anext(stream) == b"1"
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(1000):
            if closed:
                break
            await asyncio.sleep(0.01)

    talk(handle, use)
    assert closed


def test_a_refusal_says_what_the_server_said() -> None:
    error = fails(always(refusal(400, "too long", "prompt")))
    assert (error.status, error.message, error.param, error.may_pass) == (400, "too long", "prompt", False)
    assert str(error).startswith("http://127.0.0.1:") and str(error).endswith("/x answered 400: too long")
    error = fails(always(refusal(429, "full", Retry_After="7")))
    assert (error.status, error.retry_after, error.may_pass) == (429, 7, True)
    for body in (b"<html>bad gateway</html>", b'"text"', b"[]", b'{"error": "no"}', b""):
        error = fails(always(answer(body, 502, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")))
        assert (error.status, error.retry_after, error.message) == (502, None, body.decode() or "nothing further")


def test_a_connection_serves_on_after_a_refusal() -> None:
    async def use(client: ServerClient) -> Any:
        with pytest.raises(ServerError):
            await client.get("/x")
        return await client.get("/x")

    result, requests = talk(always(refusal(400, "no"), answer({})), use)
    assert result == {} and [r.number_on_connection for r in requests] == [0, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no answer: the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}", "no answer: the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Len", "no answer: the server closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "no answer: the answer is not HTTP"),
        (b"HTTP/1.1 OK\r\n\r\n", "no answer: invalid literal"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no answer: invalid literal"),
        (answer(b"{"), "the answer is not JSON"),
    ],
)
def test_what_is_no_answer(data: bytes, message: str) -> None:
    async def handle(request: Request) -> bytes:
        request.writer.write(data)
        return b""

    error = fails(handle)
    assert message in str(error) and error.status is None and error.may_pass


def test_a_server_that_says_nothing() -> None:
    async def silent(request: Request) -> bytes:
        await asyncio.sleep(60)
        return b""

    async def half(request: Request) -> bytes:
        request.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{")
        return await silent(request)

    for handler in (silent, half):
        assert "no answer in time (--timeout)" in str(fails(handler, timeout=0.2))


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = ServerClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ServerError, match="no answer: Connection refused") as raised:
            asyncio.run(client.get("/x"))
    assert raised.value.may_pass


@pytest.mark.parametrize(
    ("url", "path"),
    [("", "/v1/x"), ("/", "/v1/x"), ("/v1", "/v1/x"), ("/v1/", "/v1/x"), ("/llm", "/llm/v1/x"), ("/a/v1", "/a/v1/x")],
)
def test_the_path_of_the_url(url: str, path: str) -> None:
    async def run(root: str) -> None:
        await ServerClient(root + url).get("/v1/x")

    with ScriptedServer(always(answer({}))) as server:
        asyncio.run(run(server.url))
        assert server.requests[0].path == path


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://h:99999", "http://u:p@h", "http://h?x=1"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(CliError, match="--url"):
        ServerClient(url)


@pytest.mark.parametrize("key", ["a\r\nX: y", "é"])
def test_keys_that_no_header_holds(key: str) -> None:
    with pytest.raises(CliError, match="API key") as raised:
        ServerClient("http://h", key)
    assert key not in str(raised.value)


def test_retries_until_it_passes(waits: list[float]) -> None:
    answers = [
        refusal(429, "full", Retry_After="3"),
        refusal(503, "starting"),
        *[b""] * 2,  # on the old connection, which is replaced at once, and on the new one
        refusal(502, "x"),
        answer({"n": 1}),
    ]
    result, requests = talk(always(*answers), lambda client: with_retries(lambda: client.get("/x")))
    assert result == {"n": 1} and len(requests) == 6
    assert waits == [3, *server_client.RETRY_DELAYS[1:4]]


def test_retries_end(waits: list[float]) -> None:
    with ScriptedServer(always(refusal(503, "still starting"))) as server:
        client = ServerClient(server.url)
        with pytest.raises(ServerError, match="answered 503: still starting"):
            asyncio.run(with_retries(lambda: client.get("/x")))
        assert len(server.requests) == len(server_client.RETRY_DELAYS) + 1
    assert waits == list(server_client.RETRY_DELAYS)


@pytest.mark.parametrize("data", [refusal(400, "no"), refusal(500, "no"), refusal(429, "no", Retry_After="3600")])
def test_what_is_not_tried_again(data: bytes, waits: list[float]) -> None:
    with ScriptedServer(always(data)) as server:
        client = ServerClient(server.url)
        with pytest.raises(ServerError, match="no"):
            asyncio.run(with_retries(lambda: client.get("/x")))
        assert len(server.requests) == 1 and not waits

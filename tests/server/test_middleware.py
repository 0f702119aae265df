"""The layers around the endpoints, around endpoints that need no engine."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from vllm.server.http import middleware
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState

KEY = {"Authorization": "Bearer k1"}
ORIGIN = {"Origin": "https://page.example"}


class Lines(logging.Handler):
    """The access log's lines."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def json(self) -> list[dict[str, Any]]:
        return [json.loads(record.getMessage()) for record in self.records]


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    log, handler = logging.getLogger("vllm.access.test"), Lines()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.handlers = [handler]
    monkeypatch.setattr(middleware, "access_logger", lambda log_format: log)
    return handler


def cut_short(state: ServerState) -> None:
    """As the launcher ends what is in flight."""
    state.draining = True
    for task in tuple(state.in_flight):
        task.cancel()


def make_app(**args: Any) -> tuple[FastAPI, ServerState]:
    state = ServerState(None, ServerArgs(**args))
    app = FastAPI()
    app.state.serving = state
    middleware.install(app, state)

    @app.get("/health")
    @app.post("/ping")
    async def health() -> Response:
        return PlainTextResponse("fine")

    @app.get("/load")
    @app.post("/v1/load")
    async def load() -> Response:
        return PlainTextResponse(str(len(state.in_flight)))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return PlainTextResponse(request.state.request_id)

    @app.post("/v1/use")
    async def use(request: Request) -> Response:
        await request.body()
        request.state.usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        return PlainTextResponse("used")

    @app.post("/v1/break")
    async def broken() -> Response:
        raise ZeroDivisionError("at /secret/path")

    @app.post("/v1/break-late")
    async def broken_late(events: bool, error: bool) -> Response:
        async def content():
            yield b"data: 1\n\n"
            if error:
                raise ZeroDivisionError("at /secret/path")
            cut_short(state)
            await asyncio.sleep(30)

        return StreamingResponse(content(), media_type="text/event-stream" if events else "text/plain")

    @app.post("/v1/wait")
    async def wait() -> Response:
        await asyncio.sleep(30)
        return PlainTextResponse("waited")

    return app, state


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1_2.3:4/5", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a\tb", False),
        ("ü", False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_a_sane_request_id_is_kept(given, kept, lines):
    app, _ = make_app(access_log_format="json")
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    answer = call(app, "GET", "/v1/models", headers=headers)
    own = answer.headers["x-request-id"]
    assert (own == given) is kept
    assert own == answer.text == lines.json()[0]["request_id"]
    assert call(app, "GET", "/v1/models", headers=headers).headers["x-request-id"] == own or not kept


def test_errors_have_the_request_id_too(lines):
    app, _ = make_app(api_key=["k1"])
    for method, path in [("GET", "/nowhere"), ("POST", "/v1/break"), ("PUT", "/health"), ("GET", "/v1/models")]:
        for headers in ({}, KEY):
            answer = call(app, method, path, headers={"X-Request-Id": "mine", **headers})
            assert answer.headers.get_list("x-request-id") == ["mine"], path


OPEN = ["/health", "/load"]
CLOSED = [("GET", "/v1/models"), ("POST", "/v1/use"), ("GET", "/nowhere"), ("GET", "/staticky"), ("GET", "/health/x")]


@pytest.mark.parametrize(("method", "path"), [*CLOSED, ("GET", "//v1/models"), ("OPTIONS", "/v1/models")])
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer k3", "Bearer k", "Bearer k11", "Basic k1", "k1", "Bearer kü"]
)
def test_without_a_known_key_nobody_gets_in(method, path, header, lines):
    app, _ = make_app(api_key=["k1", "k2"])
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = call(app, method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error.pop("message")
    assert error == {"type": "authentication_error", "param": None, "code": "invalid_api_key"}


@pytest.mark.parametrize("header", ["Bearer k1", "Bearer k2", "bearer k1", "Bearer  k1", "Bearer schlüssel"])
def test_with_one_everybody_does(header, lines):
    app, _ = make_app(api_key=["k1", "k2", "schlüssel"])
    for encoding in ("utf-8",) if header.isascii() else ("utf-8", "latin-1"):
        headers = {"Authorization": header.encode(encoding)}
        assert call(app, "POST", "/v1/use", headers=headers).status_code == (200 if encoding == "utf-8" else 401)


def test_the_key_may_come_from_the_environment(lines, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    app, _ = make_app()
    assert call(app, "GET", "/v1/models").status_code == 401
    assert call(app, "GET", "/v1/models", headers={"Authorization": "Bearer from-env"}).status_code == 200
    app, _ = make_app(api_key=["k1"])
    assert call(app, "GET", "/v1/models", headers={"Authorization": "Bearer from-env"}).status_code == 401


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_what_is_open_to_everybody(root_path, lines):
    app, _ = make_app(api_key=["k1"], root_path=root_path)
    for path in OPEN:
        assert call(app, "GET", path).status_code == 200
        assert call(app, "GET", root_path + path).status_code == 200
    assert call(app, "POST", "/ping").status_code == 200
    for path in ("/", "/docs", "/openapi.json", "/metrics", "/version", "/static/app.js"):
        assert call(app, "GET", path).status_code in (200, 404), path


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_a_proxy_may_take_the_root_path_away_or_not(prefix, lines):
    app, _ = make_app(root_path="/api")
    assert call(app, "GET", f"{prefix}/v1/models").status_code == 200
    assert call(app, "GET", f"{prefix}/nowhere").status_code == 404
    assert "/api/openapi.json" in call(app, "GET", f"{prefix}/docs").text
    assert call(app, "GET", f"{prefix}/openapi.json").json()["servers"] == [{"url": "/api"}]
    assert call(app, "GET", "/apiv1/models").status_code == 404


def preflight(app: FastAPI, origin: str) -> httpx.Response:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return call(app, "OPTIONS", "/v1/use", headers={"Origin": origin, **asks})


def test_any_page_may_call_by_default(lines):
    app, _ = make_app(api_key=["k1"])
    answer = preflight(app, "https://page.example")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    for path, headers in [("/v1/use", KEY), ("/v1/use", {}), ("/v1/break", KEY), ("/nowhere", KEY)]:
        answer = call(app, "POST", path, headers={**headers, **ORIGIN})
        assert answer.headers["access-control-allow-origin"] == "*", path
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"


def test_or_those_that_are_named(lines):
    app, _ = make_app(allowed_origins=["https://page.example"], allow_credentials=True)
    answer = preflight(app, "https://page.example")
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["access-control-allow-credentials"] == "true"
    answer = preflight(app, "https://other.example")
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    answer = call(app, "POST", "/v1/break", headers=ORIGIN)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = call(app, "POST", "/v1/use", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_the_log_says_what_was_asked_and_not_what_with(lines):
    app, _ = make_app(api_key=["k1"], access_log_format="json")
    call(app, "POST", "/v1/use?key=k1", headers={**KEY, "X-Request-Id": "r1"}, content=b"a secret prompt")
    call(app, "GET", "/no%0Awhere%22", headers=KEY)
    call(app, "GET", "/v1/models", headers={"Authorization": "Bearer wrong"})
    used, unknown, refused = lines.json()
    assert used.pop("time") > 0 and used.pop("ms") >= 0
    assert used == {
        "client": "127.0.0.1", "method": "POST", "path": "/v1/use", "status": 200, "prompt_tokens": 3,
        "completion_tokens": 4, "request_id": "r1",
    }  # fmt: skip
    assert (unknown["path"], unknown["status"], unknown["prompt_tokens"]) == ("/no%0Awhere%22", 404, None)
    assert refused["status"] == 401
    text = "".join(record.getMessage() for record in lines.records)
    assert not any(secret in text for secret in ("k1", "wrong", "secret"))


def test_the_log_as_text(lines):
    app, _ = make_app()
    call(app, "POST", "/v1/use", headers={"X-Request-Id": "r1"})
    call(app, "GET", "/nowhere", headers={"X-Request-Id": "r2"})
    call(app, "GET", "/health")
    used, unknown, quiet = lines.records
    start, _, rest = used.getMessage().partition(" 200 ")
    assert start == "127.0.0.1 POST /v1/use"
    assert rest.endswith(" ms prompt_tokens=3 completion_tokens=4 id=r1")
    assert unknown.getMessage().endswith(" ms id=r2")
    assert [record.levelno for record in lines.records] == [logging.INFO, logging.INFO, logging.DEBUG]
    assert " /health 200 " in quiet.getMessage()


def test_no_log_is_no_log(lines):
    app, _ = make_app(access_log=False)
    assert call(app, "POST", "/v1/use").status_code == 200
    assert not lines.records


def test_an_exception_is_an_error_that_tells_nothing(lines):
    app, _ = make_app(access_log_format="json")
    answer = call(app, "POST", "/v1/break")
    assert answer.status_code == 500 == lines.json()[0]["status"]
    message = "internal error: ZeroDivisionError"
    assert answer.json()["error"] == {
        "message": message, "type": "internal_error", "param": None, "code": "internal_error",
    }  # fmt: skip


@pytest.mark.parametrize("error", [True, False])
def test_a_stream_that_breaks_says_so(error, lines):
    """With an event of its own; any other answer just ends without its end."""
    app, _ = make_app()
    answer = call(app, "POST", "/v1/break-late", params={"events": True, "error": error})
    first, second, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    found = json.loads(second.removeprefix("data: "))["error"]
    assert found["code"] == ("internal_error" if error else "shutting_down")
    assert "secret" not in found["message"]


def messages_of(app: FastAPI, path: str, query: bytes = b"", *incoming: dict[str, Any]) -> list[dict[str, Any]]:
    """The application's messages for a POST, message by message."""
    sent: list[dict[str, Any]] = []
    waiting = [*incoming, {"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.sleep(30)
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "headers": [], "client": None}
    asyncio.run(app({**scope, "http_version": "1.1", "scheme": "http", "server": None}, receive, send))
    return sent


@pytest.mark.parametrize("error", [b"true", b"false"])
def test_another_answer_that_breaks_has_no_end(error, lines):
    """So that the server closes the connection, and the client sees that something is missing."""
    app, _ = make_app()
    *_, last = messages_of(app, "/v1/break-late", b"events=false&error=" + error)
    assert (last["body"], last["more_body"]) == (b"data: 1\n\n", True)


def test_a_client_that_went_away_is_499_in_the_log(lines):
    app, _ = make_app(access_log_format="json")

    @app.post("/v1/watch")
    async def watch(request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0)
        return PlainTextResponse("nobody reads this", status_code=499)

    @app.post("/v1/stream")
    async def stream() -> Response:
        async def content():
            yield b"1"
            await asyncio.sleep(30)

        return StreamingResponse(content())

    for path in ("/v1/watch", "/v1/stream"):
        messages_of(app, path, b"", {"type": "http.request", "body": b""}, {"type": "http.disconnect"})
    assert [line["status"] for line in lines.json()] == [499, 499]


def test_one_that_was_not_asked_for_its_body_is_not_kept(lines):
    """Nobody could tell whether what it sends next is the body or another request."""
    app, _ = make_app(api_key=["k1"])

    async def first_of(path: str, expect: bool) -> dict[str, Any]:
        answer: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            answer.append(message)

        headers = [(b"expect", b"100-continue")] if expect else []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "client": None}
        await app({**scope, "headers": [*headers, (b"authorization", b"Bearer k1")]}, receive, send)
        return dict(answer[0]["headers"])

    for path, expect, closes in [("/nowhere", True, True), ("/nowhere", False, False), ("/v1/use", True, False)]:
        headers = asyncio.run(first_of(path, expect))
        assert (headers.get(b"connection") == b"close") is closes


def test_head_is_get_without_the_body(lines):
    app, _ = make_app()
    assert call(app, "HEAD", "/health").status_code == 200
    assert call(app, "HEAD", "/v1/use").status_code == 405


def test_work_is_counted_and_refused_when_the_server_stops(lines):
    app, state = make_app()
    assert call(app, "GET", "/load").text == "0"
    assert call(app, "POST", "/v1/load").text == "1"
    state.draining = True
    answer = call(app, "POST", "/v1/use")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["connection"] == "close"
    assert answer.json()["error"]["code"] == "shutting_down"
    assert call(app, "POST", "/ping").status_code == 200
    assert call(app, "GET", "/v1/models").status_code == 200
    assert not state.in_flight


def test_work_that_is_cut_short_is_told_so(lines):
    app, state = make_app(access_log_format="json")

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asking = asyncio.create_task(client.post("/v1/wait"))
            while not state.in_flight:
                await asyncio.sleep(0)
            cut_short(state)
            return await asking

    answer = asyncio.run(run())
    assert answer.status_code == 503 == lines.json()[0]["status"]
    assert answer.json() == state.stopping_error().body()
    assert not state.in_flight


def test_a_cancelled_request_of_a_server_that_goes_on_is_cancelled(lines):
    app, state = make_app()

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await asyncio.wait_for(client.post("/v1/wait"), 0.05)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(run())
    assert not state.in_flight

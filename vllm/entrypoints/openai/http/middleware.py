"""What happens to every request around its endpoint: its id, its line in the log, who may ask, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import sys
import time
import uuid
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm import envs
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.http.streaming import DONE
from vllm.entrypoints.openai.state import ServerState
from vllm.logger import init_logger

logger = init_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""For the log only: nobody reads it."""

_OPEN_PATHS = {"/", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"}
"""Answered without a key."""

_QUIET_PATHS = {"/health", "/ping", "/metrics"}
"""Asked by machines, all the time."""

_MAX_REQUEST_ID = 128


def install(app: FastAPI, state: ServerState) -> None:
    """Put the middleware around the application's routes."""
    args = state.args
    app.add_middleware(AuthMiddleware, state=state, keys=args.api_key or envs.api_keys())
    # Around authentication, so that a page is told what was wrong, and may ask beforehand without a key.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins or ["*"],
        allow_credentials=args.allow_credentials,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    log = access_logger(args.access_log_format) if args.logs_requests else None
    app.add_middleware(RequestTracker, state=state, log=log)


class RequestTracker:
    """Gives each request its id, and the log a line about it."""

    def __init__(self, app: ASGIApp, state: ServerState, log: logging.Logger | None) -> None:
        self._app = app
        self._state = state
        self._log = log
        self._line = _json_line if state.args.access_log_format == "json" else _text_line
        self._root_path = state.args.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = RequestContext(scope, receive, send, self._state)
        if self._root_path:
            scope["root_path"] = self._root_path
            # Whether the proxy took it away or not: by ASGI's rule the path has it.
            if not _is_below(scope["path"], self._root_path):
                scope["path"] = self._root_path + scope["path"]
        try:
            await self._app(scope, context.receive, context.send)
        finally:
            if self._log is not None:
                level = logging.DEBUG if route_of(scope) in _QUIET_PATHS else logging.INFO
                if self._log.isEnabledFor(level):
                    self._log.log(level, "%s", self._line(context.record()))


class RequestContext:
    """A request and its answer, as they go by."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: ServerState) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._state = state
        self._began = time.monotonic()
        headers = Headers(scope=scope)
        self.request_id = _sane_id(headers.get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._awaits_permission = headers.get("expect", "").lower() == "100-continue"
        self._status = 500
        self._complete = False
        self._client_left = False

    async def receive(self) -> Message:
        """The next of the request; notes when the client goes."""
        self._awaits_permission = False
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self._client_left = True
        return message

    async def send(self, message: Message) -> None:
        """The next of the answer; adds the id."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            # A client that was not asked for its body may send it all the same, or not: nobody could tell its next
            # request from it. And one whose server is about to stop had better connect elsewhere.
            if self._awaits_permission or self._state.draining:
                headers["Connection"] = "close"
        elif not message.get("more_body", False):
            self._complete = True
        await self._send(message)

    def record(self) -> dict[str, Any]:
        """What the log says."""
        client = self._scope.get("client")
        usage = self._scope["state"].get("usage") or {}
        left = self._client_left and not self._complete
        return {
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "path": quote(self._scope["path"]),
            "status": CLIENT_CLOSED_REQUEST if left else self._status,
            "ms": round((time.monotonic() - self._began) * 1000, 1),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "request_id": self.request_id,
        }


class AuthMiddleware:
    """Lets requests in that have a key while the server takes work, and gives an error to each that comes out without
    an answer."""

    def __init__(self, app: ASGIApp, state: ServerState, keys: list[str]) -> None:
        self._app = app
        self._state = state
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            # The server below leaves the body out.
            scope = {**scope, "method": "GET"}
        is_work = scope["method"] == "POST" and route_of(scope) != "/ping"
        answer = _Answer(send)
        task = asyncio.current_task()
        assert task is not None
        try:
            self._check_key(scope)
            if is_work:
                self._state.check_accepting()
                self._state.in_flight.add(task)
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._state.draining:
                raise
            # By the launcher. Once more means that the client does not read what it is told here.
            with contextlib.suppress(asyncio.CancelledError):
                await answer.fail(self._state.stopping_error(), scope, receive)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("%s %s failed", scope["method"], quote(scope["path"]))
            await answer.fail(as_api_error(error), scope, receive)
        finally:
            self._state.in_flight.discard(task)

    def _check_key(self, scope: Scope) -> None:
        """
        Raises:
            ApiError: 401, the request needs a key and has none that is known.
        """
        route = route_of(scope)
        if not self._keys or route in _OPEN_PATHS or _is_below(route, "/static"):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        given = _digest(key.strip().encode("latin-1"))
        # All are compared, and in constant time: how long it takes says nothing about any of them.
        if not any([hmac.compare_digest(given, known) for known in self._keys]):
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")


class _Answer:
    """What has been sent of an answer, and how it can still become an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._complete = False
        self._is_event_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._is_event_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-")
        elif not message.get("more_body", False):
            self._complete = True
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Make it an error, or an event of one. An answer of another kind that has begun stays without its end, which
        closes the connection: the client sees that something is missing."""
        if not self._started:
            await error.response()(scope, receive, self._send)
        elif self._is_event_stream and not self._complete:
            event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + DONE
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def route_of(scope: Scope) -> str:
    """The path as the routes know it, without the root path."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and _is_below(path, root) else path


def access_logger(log_format: Literal["text", "json"]) -> logging.Logger:
    """Where the lines go: stdout, each one JSON object or with a time in front."""
    found = logging.getLogger("vllm.access")
    handler = logging.StreamHandler(sys.stdout)
    if log_format == "text":
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    found.handlers = [handler]
    found.propagate = False
    return found


def _text_line(record: dict[str, Any]) -> str:
    line = "{client} {method} {path} {status} {ms} ms".format(**record)
    if record["prompt_tokens"] is not None:
        line += " prompt_tokens={prompt_tokens} completion_tokens={completion_tokens}".format(**record)
    return f"{line} id={record['request_id']}"


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps({"time": round(time.time(), 3), **record})


def _sane_id(text: str | None) -> str | None:
    """The text, if it can stand in headers and logs: printable ASCII without spaces, not too long."""
    if text and len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable() and " " not in text:
        return text
    return None


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")

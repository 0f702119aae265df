"""Middleware around every endpoint: request ids, access log, authentication, errors."""

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

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm import envs
from vllm.logger import init_logger
from vllm.server.errors import ApiError, as_api_error, is_of_messages, path_of
from vllm.server.http.extra_middleware import install_middleware
from vllm.server.state import ServerState, state_of
from vllm.tracing import continued, extract_trace_headers, has_current_span

logger = init_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client disconnected."""

# Answered without an API key.
_OPEN_PATHS = {"/", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"}

# Polled by machines: logged at DEBUG.
_QUIET_PATHS = {"/health", "/ping", "/metrics"}

_MAX_REQUEST_ID = 128


def install(app: FastAPI, state: ServerState) -> None:
    """Add all middleware to the application."""
    args = state.args
    app.add_middleware(AuthMiddleware, keys=args.api_key or envs.api_keys())
    # Outside authentication: preflight requests have no key, and browsers show errors only with CORS headers.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins or ["*"],
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods or ["*"],
        allow_headers=args.allowed_headers or ["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    install_middleware(app, args.middleware or [])
    app.add_middleware(TraceContextMiddleware)
    log = access_logger(args.access_log_format) if args.logs_requests else None
    paths = (args.disable_access_log_for_endpoints or "").split(",")
    app.add_middleware(RequestTracker, log=log, unlogged=frozenset(path.strip() for path in paths))


class RequestTracker:
    """Gives each request its id, and logs it."""

    def __init__(self, app: ASGIApp, log: logging.Logger | None, unlogged: frozenset[str]) -> None:
        """`unlogged`: paths that the log leaves out."""
        self._app = app
        self._log = log
        self._unlogged = unlogged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = state_of(scope["app"])
        context = RequestContext(scope, receive, send, state)
        args = state.args
        if args.root_path:
            scope["root_path"] = args.root_path
            # By ASGI's rule the path includes the root path, whether the proxy removed it or not.
            if not _is_below(scope["path"], args.root_path):
                scope["path"] = args.root_path + scope["path"]
        try:
            await self._app(scope, context.receive, context.send)
        finally:
            del scope["state"]["context"]  # a reference cycle, which may hold a large body
            if route_of(scope) not in _QUIET_PATHS:
                state.http_metrics.count(scope, context.record())
            if self._log is not None and route_of(scope) not in self._unlogged:
                level = logging.DEBUG if route_of(scope) in _QUIET_PATHS else logging.INFO
                if self._log.isEnabledFor(level):
                    self._log.log(level, "%s", _line(context.record(), args.access_log_format))


class RequestContext:
    """Watches the messages of a request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: ServerState) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._state = state
        self._began = time.monotonic()
        headers = Headers(scope=scope)
        self._request_id = _sane_id(headers.get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=self._request_id, context=self)
        self._awaits_permission = headers.get("expect", "").lower() == "100-continue"
        self._status = 500
        self.is_started = self.is_complete = self.is_event_stream = self._client_left = False

    async def receive(self) -> Message:
        """ASGI's receive."""
        self._awaits_permission = False
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.is_complete:
            self._client_left = True
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send, with further headers."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.is_started = True
            headers = MutableHeaders(scope=message)
            self.is_event_stream = headers.get("content-type", "").startswith("text/event-")
            headers["X-Request-Id"] = self._request_id
            if is_of_messages(path_of(self._scope)):
                # Where Anthropic's clients look for it.
                headers["Request-Id"] = self._request_id
            # A client still waiting for "100 Continue" may send its body or not, so that the start of a next request
            # on the connection would be ambiguous. A stopping server sends its clients elsewhere.
            if self._awaits_permission or self._state.draining:
                headers["Connection"] = "close"
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    def record(self) -> dict[str, Any]:
        """The log's entry."""
        client = self._scope.get("client")
        usage = self._scope["state"].get("usage") or {}
        left = self._client_left and not self.is_complete
        note = self._scope["state"].get("note")
        return {
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "path": quote(self._scope["path"]),
            "status": CLIENT_CLOSED_REQUEST if left else self._status,
            "ms": round((time.monotonic() - self._began) * 1000, 1),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "request_id": self._request_id,
            **({"note": note} if note else {}),
        }


class AuthMiddleware:
    """Admits requests with a valid key while the server accepts work, and turns exceptions into answers."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            # uvicorn omits the body.
            scope = {**scope, "method": "GET"}
        is_work = scope["method"] == "POST" and route_of(scope) != "/ping"
        task = asyncio.current_task()
        assert task is not None
        state = state_of(scope["app"])
        try:
            self._check_key(scope)
            if is_work:
                state.check_accepting()
                state.in_flight.add(task)
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not state.draining:
                raise
            # Cancelled by the launcher. A second time means that the client does not read this answer.
            with contextlib.suppress(asyncio.CancelledError):
                await _fail(state.stopping_error(), scope, receive, send)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("%s %s failed", scope["method"], quote(scope["path"]))
            await _fail(as_api_error(error), scope, receive, send)
        finally:
            state.in_flight.discard(task)

    def _check_key(self, scope: Scope) -> None:
        """Raise ApiError 401 for a request that needs a valid key and has none."""
        route = route_of(scope)
        if not self._keys or route in _OPEN_PATHS or _is_below(route, "/static"):
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            # As Anthropic's clients send it.
            key = headers.get("x-api-key", "")
        if not key:
            message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, message, code="invalid_api_key")
        given = _digest(key.strip().encode("latin-1"))
        # All are compared, in constant time: timing reveals nothing about them.
        if not any([hmac.compare_digest(given, known) for known in self._keys]):
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")


async def _fail(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error, or send it as an event. Another answer that has begun stays without its end: the
    connection closes, and the client sees that it is incomplete."""
    context: RequestContext = scope["state"]["context"]
    if not context.is_started:
        await error.response(path_of(scope))(scope, receive, send)
    elif context.is_event_stream and not context.is_complete:
        await send({"type": "http.response.body", "body": error.event(scope["path"]), "more_body": False})


def route_of(scope: Scope) -> str:
    """The path without the root path, as routes declare it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and _is_below(path, root) else path


def access_logger(log_format: Literal["text", "json"]) -> logging.Logger:
    """A logger to stdout; text lines begin with the time."""
    found = logging.getLogger("vllm.access")
    handler = logging.StreamHandler(sys.stdout)
    if log_format == "text":
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    found.handlers = [handler]
    found.propagate = False
    return found


def _line(record: dict[str, Any], log_format: Literal["text", "json"]) -> str:
    if log_format == "json":
        return json.dumps({"time": round(time.time(), 3), **record})
    line = "{client} {method} {path} {status} {ms} ms".format(**record)
    if record["prompt_tokens"] is not None:
        line += " prompt_tokens={prompt_tokens} completion_tokens={completion_tokens}".format(**record)
    line = f"{line} id={record['request_id']}"
    return f"{line} note={record['note']!r}" if "note" in record else line


def _sane_id(text: str | None) -> str | None:
    """The text, if it is fit for headers and logs: printable ASCII without spaces, not too long."""
    is_sane = text and len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable() and " " not in text
    return text if is_sane else None


def _digest(key: bytes) -> bytes:
    """A digest of fixed length, so that comparing it does not reveal the key's."""
    return hashlib.sha256(key).digest()


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


class TraceContextMiddleware:
    """Makes the caller's trace current, so that the spans of the engine's requests are part of it. What instruments the
    application has done so already, with a span of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer = state_of(scope["app"]).tracer if scope["type"] == "http" else None
        headers = {}
        if tracer is not None and scope["type"] == "http" and not has_current_span():
            headers = extract_trace_headers(Headers(scope=scope))
        with continued(tracer, headers):
            await self._app(scope, receive, send)

"""The caller's trace, by W3C's headers of its request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.server.state import ServerState
from vllm.tracing import continued, extract_trace_headers, has_current_span


class TraceContextMiddleware:
    """Makes the caller's trace current, so that the spans of the engine's requests are part of it. What instruments the
    application has done so already, with a span of its own."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer = self._state.tracer
        headers = {}
        if tracer is not None and scope["type"] == "http" and not has_current_span():
            headers = extract_trace_headers(Headers(scope=scope))
        with continued(tracer, headers):
            await self._app(scope, receive, send)

"""The session that a request is part of, which goes with it to the engine."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from starlette.requests import Request

HEADER = "X-Session-ID"

session: ContextVar[str | None] = ContextVar("session", default=None)
"""The session of the request that is served."""


def note_session(request: Request, body: Any) -> None:
    """Set `session` to the body's `session_id`, else to the header's; None: neither has a text."""
    given = body.get("session_id") if isinstance(body, dict) else None
    session.set(given if given and isinstance(given, str) else request.headers.get(HEADER) or None)

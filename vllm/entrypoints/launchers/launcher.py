"""Serves an application until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import uvicorn

from vllm.server.ssl_refresh import refresh_certificates

if TYPE_CHECKING:
    from fastapi import FastAPI


async def serve_http(
    app: FastAPI, sock: socket.socket | None, enable_ssl_refresh: bool = False, **uvicorn_kwargs: Any
) -> Coroutine[Any, Any, None]:
    """Serve an application of the caller's own until SIGINT or SIGTERM, or until the task is cancelled.

    Args:
        sock: a bound socket; None: `uvicorn_kwargs` hold host and port.
        enable_ssl_refresh: read certificates anew when their files change.
        uvicorn_kwargs: of uvicorn.Config.

    Returns:
        What is left to await: nothing, but callers await it.
    """
    config = uvicorn.Config(app, **uvicorn_kwargs)
    config.load()
    server = uvicorn.Server(config)
    refresh = asyncio.create_task(refresh_certificates(config)) if enable_ssl_refresh and config.ssl else None
    try:
        await server.serve(sockets=None if sock is None else [sock])
    finally:
        if refresh is not None:
            refresh.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refresh
    return asyncio.sleep(0)

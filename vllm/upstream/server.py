"""Parts of a server, for programs that build it themselves."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.requests import Request

from vllm.logger import init_logger
from vllm.server.serving.engine_requests import ClientDisconnected, while_connected
from vllm.server.ssl_refresh import refresh_certificates

if TYPE_CHECKING:
    from fastapi import FastAPI


async def serve_http(
    app: FastAPI, sock: socket.socket | None, enable_ssl_refresh: bool = False, **uvicorn_kwargs: Any
) -> Coroutine[Any, Any, None]:
    """Serve an application of the caller's until SIGINT or SIGTERM, or until the task is cancelled.

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


logger = init_logger(__name__)


class RequestLogger:
    """Logs what is asked. `vllm serve --enable-log-requests` does it for the server's own."""

    def __init__(self, *, max_log_len: int | None = None) -> None:
        """`max_log_len`: characters of a prompt, or its ids, that are shown; None: all."""
        self.max_log_len = max_log_len

    def log_inputs(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_embeds: Any,
        params: Any,
        lora_request: Any,
    ) -> None:
        """A line for a request."""
        shown = prompt if prompt is None else prompt[: self.max_log_len]
        ids = prompt_token_ids if prompt_token_ids is None else prompt_token_ids[: self.max_log_len]
        logger.info("request %s: prompt %r, ids %s, %s", request_id, shown, ids, params)

    def log_outputs(
        self,
        request_id: str,
        outputs: str,
        output_token_ids: list[int] | None,
        finish_reason: str | None = None,
        is_streaming: bool = False,
        delta: bool = False,
    ) -> None:
        """A line for an answer, or for a part of one."""
        shown = outputs[: self.max_log_len]
        logger.info("answer %s: %r, finish reason %s", request_id, shown, finish_reason)


@dataclass
class BaseModelPath:
    """The model: `name` is what requests call it."""

    name: str
    model_path: str


def with_cancellation(
    handler_func: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Cancel a handler when its client disconnects; its result is None then.

    Args:
        handler_func: takes the body, which has been read, and the Request, as its second argument or as `raw_request`.
    """

    @functools.wraps(handler_func)
    async def handler(*args: Any, **kwargs: Any) -> Any:
        request: Request = args[1] if len(args) > 1 else kwargs["raw_request"]
        with_client = while_connected(request, handler_func(*args, **kwargs))
        try:
            return await with_client
        except ClientDisconnected:
            return None

    return handler

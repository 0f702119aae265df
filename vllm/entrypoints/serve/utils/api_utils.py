"""Endpoints of callers' own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request

from vllm.server.serving.engine_requests import ClientDisconnected, while_connected


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

"""Users' middleware, by the path it is imported from."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware


def load_middleware(path: str) -> Any:
    """The class or async function at `path`, as module.Name.

    Raises:
        ValueError: it is not there, or it is neither.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--middleware {path} cannot be imported: {error}") from None
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ValueError(f"--middleware {path} must be a class or an async function, got {type(found).__name__}")
    return found


def install_middleware(app: FastAPI, paths: list[str]) -> None:
    """Put the middleware at `paths` around what the application has; the last is the outermost. For errors see
    `load_middleware`."""
    for path in paths:
        found = load_middleware(path)
        is_class = inspect.isclass(found)
        if is_class:
            app.add_middleware(found)
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)

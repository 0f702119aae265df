"""Packages that only parts of the engine need: offline inference runs with torch and transformers alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_INSTALL_NAMES = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
_PACKAGES = {
    "argcomplete", "fastapi", "gguf", "httptools", "jinja2", "msgspec", "prometheus_client", "pydantic", "rich",
    "starlette", "uvicorn", "uvloop", "zmq",
}  # fmt: skip


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Around imports: a missing package's ModuleNotFoundError says that `what` needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _PACKAGES:
            raise
        package = _INSTALL_NAMES.get(module, module)
        raise ModuleNotFoundError(
            f"{what} needs the package {package}, which is not installed: pip install {package}", name=module
        ) from error

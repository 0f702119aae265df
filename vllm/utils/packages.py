"""Packages that a part of the engine needs and the rest does without: offline inference runs from a bare checkout with
torch and transformers."""

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
    """Where one of them is imported.

    Args:
        what: that the user asked for, at the beginning of the error's sentence.

    Raises:
        ModuleNotFoundError: one is missing; says how to install it.
    """
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

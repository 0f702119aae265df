"""Names whose feature is absent, made of their row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from vllm.utils.unserved import Unserved, refuse


def refused(module: str, name: str, instead: str, is_function: bool) -> type[Unserved] | Callable[..., NoReturn]:
    """A class that can be imported, subclassed and asked isinstance of, or a function; a NotImplementedError with
    `instead` when it is used."""
    if not is_function:
        return type(name, (Unserved,), {"__module__": module, "__doc__": f"Not here: {instead}.", "instead": instead})

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    function.__module__, function.__name__, function.__qualname__ = module, name, name
    function.__doc__ = f"Not here: {instead}."
    return function

"""Names whose feature is absent, made of their row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from vllm.upstream.utils.unserved import refuse


class Unserved:
    """Base of classes of which no instance can be made."""

    instead: ClassVar[str]
    """Why, and what to do instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse(type(self).__name__, self.instead)


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

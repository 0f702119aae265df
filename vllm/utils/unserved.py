"""Names whose feature is absent: they can be imported and asked isinstance of, and say what to do when used."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


def refuse(name: str, instead: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: "name: instead".
    """
    raise NotImplementedError(f"{name}: {instead}")


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

"""The error of a name whose feature is absent."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str, instead: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: "name: instead".
    """
    raise NotImplementedError(f"{name}: {instead}")

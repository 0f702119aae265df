"""The error of a name whose feature is absent."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str, instead: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: "name: instead".
    """
    raise NotImplementedError(f"{name}: {instead}")


class AbsentAttributeError(NotImplementedError, AttributeError):
    """An attribute whose feature is absent: to hasattr and getattr it is not there, so that programs for several
    releases take their other way."""


def refuse_attribute(name: str, instead: str) -> NoReturn:
    """
    Raises:
        AbsentAttributeError: always: "name: instead".
    """
    raise AbsentAttributeError(f"{name}: {instead}")

"""The format of gpt-oss, which is not read here."""

from __future__ import annotations

from typing import NoReturn


def get_encoding() -> NoReturn:
    """
    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("the format of gpt-oss (harmony) is not implemented: its text is returned as it is")

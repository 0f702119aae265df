"""argparse types with a bound."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """An integer that is not below `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """An integer, maybe with a unit: 4k is 4,000, 4K is 4,096; 1.5k and 1M are fine, too. "auto" is -1."""
    if text == "auto":
        return -1
    unit = _SIZES.get(text[-1:], 1)
    number = text[:-1] if unit > 1 else text
    value = float(number) * unit if unit > 1 and "." in number else int(number) * unit
    if value != int(value) or (unit >= 2**10 and unit & (unit - 1) == 0 and "." in number):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def json_or_text(text: str) -> Any:
    """What the text says as JSON, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text

"""argparse types and options."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal


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


def flag_help(metadata: Mapping[str, Any]) -> str:
    """The help of a field's flag. Flags that are only accepted at their default have none: they are upstream's, and
    would hide the others."""
    return argparse.SUPPRESS if "refused" in metadata else metadata["help"]


def flag_options(hint: Any) -> dict[str, Any]:
    """argparse options for a field's type; of several, the one that a command line can hold."""
    members = [each for each in typing.get_args(hint) or (hint,) if each is not type(None)]
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if members == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    kinds = [typing.get_origin(each) or each for each in members]
    for each, kind in zip(members, kinds, strict=True):
        if kind is Literal:
            return {"choices": typing.get_args(each)}
        if kind is dict:
            return {"type": json_or_text if len(kinds) > 1 else _json_object, "metavar": "JSON"}
        if kind is list:
            (element,) = typing.get_args(each)
            return {"nargs": "+", "metavar": "NAME", "type": element if isinstance(element, type) else str}
    if kinds == [int]:
        return {"type": size, "metavar": "INT"}
    if kinds == [float]:
        return {"type": float, "metavar": "FLOAT"}
    return {"type": str, "metavar": "STR"}


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value

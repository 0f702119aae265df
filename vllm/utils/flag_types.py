"""argparse types and options."""

from __future__ import annotations

import argparse
import json
import re
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def human_readable_int(value: str) -> int:
    """An integer, or one with a suffix: k, m, g, t stand for powers of 1000, K, M, G, T for powers of 1024. The number
    before a small suffix may have a fraction.

    Raises:
        argparse.ArgumentTypeError: it is neither, or no whole number.
    """
    text = value.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        if re.fullmatch(r"-\d+", text):
            return int(text)
        raise argparse.ArgumentTypeError(f"must be an integer such as 4096, 4k or 4K, got {value!r}")
    number, suffix = match.groups()
    is_binary = suffix.isupper()
    if "." in number and (not suffix or is_binary):
        raise argparse.ArgumentTypeError(f"a fraction needs one of k, m, g, t (powers of 1000), got {value!r}")
    size = Decimal(number) * (1024 if is_binary else 1000) ** _POWERS.get(suffix.lower(), 0)
    if size != int(size):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {value!r}")
    return int(size)


def human_readable_int_or_auto(value: str) -> int:
    """`human_readable_int`, or -1 for "auto"."""
    return -1 if value.strip().lower() == "auto" else human_readable_int(value)


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


def json_or_text(text: str) -> Any:
    """The value of the text as JSON, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def flag_options(hint: Any) -> dict[str, Any]:
    """argparse options for a field's type; of several, the one that a command line can hold."""
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    given = typing.get_args(hint) or (hint,)
    members = [member for member in given if member is not type(None) and typing.get_origin(member) is not Callable]
    if members == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    kinds = [typing.get_origin(each) or each for each in members]
    for each, kind in zip(members, kinds, strict=True):
        if kind is Literal:
            return {"choices": typing.get_args(each)}
        if kind is dict:
            return {"type": json_or_text if len(kinds) > 1 else json_object, "metavar": "JSON"}
        if kind is list:
            (element,) = typing.get_args(each)
            return {"nargs": "+", "metavar": "NAME", "type": element if isinstance(element, type) else str}
    if kinds == [int]:
        return {"type": human_readable_int_or_auto, "metavar": "INT"}
    if kinds == [float]:
        return {"type": float, "metavar": "FLOAT"}
    return {"type": str, "metavar": "STR"}


def json_object(text: str) -> dict[str, Any]:
    """The value of the text as JSON, which is an object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value

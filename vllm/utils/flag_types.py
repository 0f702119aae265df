"""argparse types and options."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable
from typing import Any, Literal

from vllm.utils.argparse_utils import human_readable_int_or_auto


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
            return {"type": json_or_text if len(kinds) > 1 else _json_object, "metavar": "JSON"}
        if kind is list:
            (element,) = typing.get_args(each)
            return {"nargs": "+", "metavar": "NAME", "type": element if isinstance(element, type) else str}
    if kinds == [int]:
        return {"type": human_readable_int_or_auto, "metavar": "INT"}
    if kinds == [float]:
        return {"type": float, "metavar": "FLOAT"}
    return {"type": str, "metavar": "STR"}


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value

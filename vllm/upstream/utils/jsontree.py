"""Dicts, lists and tuples within one another, and what stands at their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any


def json_iter_leaves(value: Any) -> Iterable[Any]:
    """All that is no dict, list or tuple, in order."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for each in value:
        yield from json_iter_leaves(each)


def json_map_leaves(func: Callable[[Any], Any], value: Any) -> Any:
    """The same tree, with `func` of each leaf."""
    if isinstance(value, dict):
        return {name: json_map_leaves(func, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(json_map_leaves(func, each) for each in value)
    return func(value)


def json_reduce_leaves(func: Callable[[Any, Any], Any], value: Any, *initial: Any) -> Any:
    """functools.reduce over the leaves."""
    return reduce(func, json_iter_leaves(value), *initial)


def json_count_leaves(value: Any) -> int:
    """How many there are."""
    return sum(1 for _ in json_iter_leaves(value))

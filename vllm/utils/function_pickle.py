"""Pickles in which functions that another process cannot import (lambdas, functions of functions and of `__main__`) are
written by value. The other process must run the same version of Python."""

from __future__ import annotations

import dis
import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def pickled(caller: str, value: Any) -> bytes:
    """A pickle that `pickle.loads` reads.

    Raises:
        ValueError: something in it cannot be pickled; names the `caller`.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{caller} cannot send this to other processes: {error}") from error
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, FunctionType) and not _is_importable(value):
            return _by_value(value)
        return NotImplemented


def _is_importable(function: FunctionType) -> bool:
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _by_value(function: FunctionType) -> tuple[Any, ...]:
    """How pickle makes the function: empty, then filled, as it may refer to itself."""
    known = function.__globals__
    state = {
        "globals": {name: known[name] for name in sorted(set(_names(function.__code__))) if name in known},
        "cells": [_contents(function, cell) for cell in function.__closure__ or ()],
        "attributes": {
            name: getattr(function, name) for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__doc__")
        },
    }
    made = marshal.dumps(function.__code__), function.__name__, len(state["cells"])
    return _empty, made, state, None, None, _fill


def _contents(function: FunctionType, cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:
        raise pickle.PicklingError(f"{function.__qualname__} uses a variable that has no value yet") from error


def _names(code: CodeType) -> Iterator[str]:
    """The globals that the code reads, maybe among names of builtins."""
    # co_names has attributes, too, whose names say nothing of globals.
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _READS_GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _empty(code: bytes, name: str, num_cells: int) -> FunctionType:
    cells = tuple(CellType() for _ in range(num_cells))
    return FunctionType(marshal.loads(code), {"__builtins__": __builtins__}, name, None, cells)


def _fill(function: FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    for cell, contents in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = contents
    for name, value in state["attributes"].items():
        setattr(function, name, value)

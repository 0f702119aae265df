"""Functions and their arguments."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from typing_extensions import ParamSpec

P = ParamSpec("P")
T = TypeVar("T")


def identity(value: T, **kwargs: Any) -> T:
    """The value."""
    return value


def run_once(f: Callable[P, None]) -> Callable[P, None]:
    """A function that calls `f` the first time that it is called, and does nothing later."""
    lock, done = threading.Lock(), False

    @functools.wraps(f)
    def once(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal done
        with lock:
            if not done:
                done = True
                f(*args, **kwargs)

    return once


def supports_kw(
    callable: Callable[..., object],
    kw_name: str,
    *,
    requires_kw_only: bool = False,
    allow_var_kwargs: bool = True,
) -> bool:
    """Whether `callable` takes an argument by that name.

    Args:
        requires_kw_only: only one that cannot be given by position counts.
        allow_var_kwargs: `**kwargs` take any name.
    """
    parameters = inspect.signature(callable).parameters
    own = parameters.get(kw_name)
    if own is not None and own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD, own.POSITIONAL_ONLY):
        return not requires_kw_only or own.kind is own.KEYWORD_ONLY
    if requires_kw_only or not allow_var_kwargs:
        return False
    return any(each.kind is each.VAR_KEYWORD and each.name != kw_name for each in parameters.values())


def get_allowed_kwarg_only_overrides(
    callable: Callable[..., object],
    overrides: Mapping[str, object] | None,
    *,
    requires_kw_only: bool = True,
    allow_var_kwargs: bool = False,
) -> dict[str, Any]:
    """The overrides that `callable` takes by name; see `supports_kw`."""
    return {
        name: value
        for name, value in (overrides or {}).items()
        if supports_kw(callable, name, requires_kw_only=requires_kw_only, allow_var_kwargs=allow_var_kwargs)
    }

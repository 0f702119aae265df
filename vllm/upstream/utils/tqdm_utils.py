"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Iterable)


def maybe_tqdm(it: _T, *, use_tqdm: bool | Callable[..., Any], **tqdm_kwargs: Any) -> Any:
    """The iterable, in a progress bar where one is wanted: tqdm's, or what `use_tqdm` makes."""
    if not use_tqdm:
        return it
    if callable(use_tqdm):
        return use_tqdm(it, **tqdm_kwargs)
    from tqdm.auto import tqdm

    return tqdm(it, **tqdm_kwargs)

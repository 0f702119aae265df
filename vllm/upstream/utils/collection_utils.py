"""Lists, and what is like them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from typing_extensions import TypeIs

T = TypeVar("T")
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def as_list(maybe_list: Iterable[T]) -> list[T]:
    """A list as it is, anything else made one."""
    return maybe_list if isinstance(maybe_list, list) else list(maybe_list)


def is_list_of(
    value: object, typ: type[T] | tuple[type[T], ...], *, check: Literal["first", "all"] = "first"
) -> TypeIs[list[T]]:
    """Whether it is a list whose first item, or every one, is a `typ`; an empty list is."""
    if not isinstance(value, list):
        return False
    items = value[:1] if check == "first" else value
    return all(isinstance(item, typ) for item in items)


def is_list_of_numbers(value: object) -> bool:
    """Whether it is a list of finite numbers; booleans are none."""
    return isinstance(value, list) and all(
        isinstance(item, (int, float)) and not isinstance(item, bool) and (isinstance(item, int) or math.isfinite(item))
        for item in value
    )


def common_prefix(items: Sequence[Sequence[T] | str]) -> Sequence[T] | str:
    """The longest beginning that all of them share."""
    if not items:
        return []
    first = min(items, key=len)
    length = 0
    while length < len(first) and all(item[length] == first[length] for item in items):
        length += 1
    return first[:length]


def chunk_list(lst: list[T], chunk_size: int) -> Generator[list[T]]:
    """Parts of `chunk_size` items; the last may be shorter."""
    for start in range(0, len(lst), chunk_size):
        yield lst[start : start + chunk_size]


def flatten_2d_lists(lists: Iterable[Iterable[T]]) -> list[T]:
    """The items of all of them, in order."""
    return [item for items in lists for item in items]


def full_groupby(values: Iterable[_V], *, key: Callable[[_V], _K]) -> Iterable[tuple[_K, list[_V]]]:
    """(key, its values) in the order in which keys first occur."""
    groups: dict[_K, list[_V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups.items()


def swap_dict_values(obj: dict[_K, _V], key1: _K, key2: _K) -> None:
    """Exchange the values of two keys; one that is missing is missing at the other key then."""
    missing = cast(Any, object())
    first, second = obj.pop(key1, missing), obj.pop(key2, missing)
    if second is not missing:
        obj[key1] = second
    if first is not missing:
        obj[key2] = first


class LazyDict(Mapping[str, T]):
    """A mapping whose values are made when they are first looked at, by functions without arguments."""

    def __init__(self, factory: dict[str, Callable[[], T]]) -> None:
        self._factory = factory
        self._made: dict[str, T] = {}

    def __getitem__(self, key: str) -> T:
        if key not in self._made:
            self._made[key] = self._factory[key]()
        return self._made[key]

    def __setitem__(self, key: str, value: Callable[[], T]) -> None:
        self._factory[key] = value
        self._made.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._factory)

    def __len__(self) -> int:
        return len(self._factory)

"""Copies of configurations with other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

_C = TypeVar("_C")


def replace(dataclass_instance: _C, /, **kwargs: Any) -> _C:
    """A copy with some fields replaced.

    Raises:
        TypeError: there is no such field.
    """
    return dataclasses.replace(dataclass_instance, **kwargs)  # type: ignore[type-var]


def update_config(config: _C, overrides: Mapping[str, Any]) -> _C:
    """A copy with some fields replaced; a mapping replaces fields of the configuration that a field holds.

    Raises:
        ValueError: there is no such field, or a mapping is given for one that holds no configuration.
    """
    known = {item.name for item in dataclasses.fields(config)}  # type: ignore[arg-type]
    changed = {}
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(f"{type(config).__name__} has no field {name!r}")
        inner = getattr(config, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(inner):
            value = update_config(inner, value)
        changed[name] = value
    return replace(config, **changed)

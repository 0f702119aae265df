"""Copies of configurations with other values."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import textwrap
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


def config(cls: Any = None, /, **kwargs: Any) -> Any:
    """A decorator that makes a dataclass, with dataclass's arguments."""
    return dataclasses.dataclass(**kwargs) if cls is None else dataclasses.dataclass(cls, **kwargs)


def get_field(cls: type, name: str) -> Any:
    """A field with the default of a dataclass's own.

    Raises:
        ValueError: there is no such field, or it has no default.
    """
    item = next((each for each in dataclasses.fields(cls) if each.name == name), None)
    if item is None:
        raise ValueError(f"{cls.__name__} has no field {name!r}")
    if item.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=item.default_factory)
    if item.default is dataclasses.MISSING:
        raise ValueError(f"the field {name!r} of {cls.__name__} has no default")
    return dataclasses.field(default=item.default)


def get_attr_docs(cls: type) -> dict[str, str]:
    """The texts that stand below a class's attributes in its source."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for attribute, below in itertools.pairwise(node.body):
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            targets = attribute.targets if isinstance(attribute, ast.Assign) else [getattr(attribute, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            docs.update(dict.fromkeys(names, inspect.cleandoc(value.value)))
    return docs


def hash_factors(items: Mapping[str, Any]) -> str:
    """SHA-256 of the values, which JSON must be able to hold, in the order of their names; 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()

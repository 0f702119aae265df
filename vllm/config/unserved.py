"""Configurations of what the engine does not do: values that callers build, and that are refused where they ask for
something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar, TypeVar

from vllm.exceptions import VLLMValidationError, shown

_C = TypeVar("_C", bound="UnservedConfig")


def choice(default: Any, *choices: Any) -> Any:
    """A field that holds one of `choices`, or None."""
    return field(default=default, metadata={"choices": choices})


def number(default: Any, low: float) -> Any:
    """A field that holds a number of at least `low`, or None."""
    return field(default=default, metadata={"low": low})


class UnservedConfig:
    """Base of a dataclass whose fields are upstream's, with upstream's defaults.

    Attributes:
        instead: what is not done, and what to do instead: the end of the refusal's sentence.
        asks_always: whether even the default values ask for it.
        harmless: fields that change nothing by themselves, or that the engine's arguments honour.
    """

    instead: ClassVar[str]
    asks_always: ClassVar[bool] = False
    harmless: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, item.name), f"{type(self).__name__}.{item.name}"
            if value is None:
                continue
            choices, low = item.metadata.get("choices"), item.metadata.get("low")
            if choices is not None and value not in choices:
                raise VLLMValidationError(
                    f"{name} must be one of {', '.join(map(str, choices))}", parameter=item.name, value=value
                )
            if low is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                message = f"{name} must be a number, got {type(value).__name__}"
                raise VLLMValidationError(message, parameter=item.name, value=value)
            if low is not None and not value >= low:
                raise VLLMValidationError(f"{name} must be at least {low}", parameter=item.name, value=value)

    def asked(self) -> dict[str, Any]:
        """The fields that ask for something, with their values: neither the default nor a neutral value."""
        found = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if item.name not in self.harmless and not is_neutral_value(value) and value != default:
                found[item.name] = value
        return found

    def is_neutral(self) -> bool:
        """Whether every field is neutral."""
        return not self.asks_always and not self.asked()


def is_neutral_value(value: Any) -> bool:
    """Whether it asks for nothing: None, False, 0, "auto", an empty text or container, a mapping to such, a neutral
    configuration."""
    if isinstance(value, UnservedConfig):
        return value.is_neutral()
    if value is None or value is False or (isinstance(value, str) and value in ("", "auto")):
        return True
    if isinstance(value, Mapping):
        return all(map(is_neutral_value, value.values()))
    return isinstance(value, (int, float, list, tuple, set, frozenset)) and not value


def as_config(argument: str, kind: type[_C], value: Any, keeps_neutral: bool = False) -> _C | None:
    """The value as a `kind`: a mapping, or one as JSON, as the command line gives it, is made one; a neutral value is
    None, unless it is a mapping and `keeps_neutral`: of a kind whose fields ask for something by False or 0.

    Raises:
        VLLMValidationError: neither a mapping of known fields nor a `kind`.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    keeps = keeps_neutral and isinstance(value, Mapping)
    if is_neutral_value(value) and not isinstance(value, kind) and not keeps:
        return None
    if isinstance(value, Mapping):
        known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        unknown = [name for name in value if name not in known]
        if asked := [name for name in unknown if not keeps or not is_neutral_value(value[name])]:
            raise VLLMValidationError(f"{argument} has no field {asked[0]!r}", parameter=argument, value=asked[0])
        return kind(**{name: own for name, own in value.items() if name in known})
    if not isinstance(value, kind):
        raise VLLMValidationError(
            f"{argument} must be a {kind.__name__} or a dict of its fields, got {type(value).__name__}",
            parameter=argument,
            value=value,
        )
    return value


def check_neutral(argument: str, kind: type[UnservedConfig], value: Any) -> None:
    """
    Raises:
        VLLMValidationError: the value asks for something; names the argument, the fields and what to do instead.
    """
    config = as_config(argument, kind, value)
    if config is None or config.is_neutral():
        return
    asked = ", ".join(f"{name}={shown(found)}" for name, found in config.asked().items())
    raise VLLMValidationError(
        f"{argument}{f' ({asked})' if asked else ''}: {kind.instead}", parameter=argument, value=config
    )

"""Values of a checkpoint's settings, checked as they are read: every ValueError names the setting."""

from __future__ import annotations

import re
from typing import Any

from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

# Weights were multiplied with this when they were quantised: activations would have to be, too.
_TRANSFORMS = ("rotation", "rotation_config", "hadamard_config", "transform_config")


def read_flag(settings: dict[str, Any], name: str, usual: bool) -> bool:
    """true or false; `usual` where it is null or not there."""
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return usual if value is None else value


def read_one(settings: dict[str, Any], names: tuple[str, ...], usual: Any) -> Any:
    """The value that has one of `names`, or several of them; `usual` where none is there, or not null.
    ValueError: they differ."""
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise ValueError(f"{' and '.join(f'{name}={value!r}' for name, value in given.items())} are one setting")
    return values[0] if values else usual


def refuse_transforms(settings: dict[str, Any]) -> None:
    """ValueError: activations must be transformed before they are multiplied."""
    for own in (settings, settings.get("meta")):
        for name in _TRANSFORMS if isinstance(own, dict) else ():
            value = own.get(name)  # type: ignore[union-attr]
            wanted = value.get("config_groups", value) if isinstance(value, dict) else value
            if wanted and str(wanted).lower() != "none":
                raise ValueError(
                    f"{name} is not implemented, got {value!r}: inputs of some weights would have to be rotated"
                )


def read_names(settings: dict[str, Any], name: str) -> list[str]:
    """Names of modules or of their classes, or expressions for them ("re:..."); none where it is null or not there."""
    value = settings.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name} must be a list of names, got {value!r}")
    for each in value:
        if each.startswith("re:"):
            check_pattern(name, each.removeprefix("re:"))
    return list(value)


def read_objects(settings: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Settings by name or pattern; none where it is null or not there."""
    value = settings.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(each, dict | None) for each in value.values()):
        raise ValueError(f"{name} must be an object of objects, got {value!r}")
    return {key: each or {} for key, each in value.items()}


def check_pattern(name: str, pattern: str) -> None:
    """ValueError: it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from None


def warn_of_unknown(known: str, settings: dict[str, Any], where: str) -> None:
    """Say which settings have no effect because they are not among `known`, names with spaces between them."""
    # A setting that is off, or empty, asks for nothing.
    unknown = sorted(
        {name for name, value in settings.items() if value} - {"quant_method", *_TRANSFORMS, *known.split()}
    )
    if unknown:
        warn_once(logger, "%s has settings that are not known here and have no effect: %s", where, ", ".join(unknown))

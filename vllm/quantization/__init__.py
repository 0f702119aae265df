"""Quantisations by name: the formats of checkpoints, each a file in `formats/`, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config.quantization import STORED
from vllm.logger import init_logger
from vllm.quantization.base_config import QuantizationConfig

if TYPE_CHECKING:
    from vllm.quantization.stored import StoredConfig

logger = init_logger(__name__)

_Config = TypeVar("_Config", bound=type[QuantizationConfig])

QuantizationMethods = str
"""Upstream's type of a name; here registered ones are names, too."""

QUANTIZATION_METHODS = list(STORED)
"""The names of formats, and those that are registered."""

_registered: dict[str, type[QuantizationConfig]] = {}


def register_quantization_config(name: str) -> Callable[[_Config], _Config]:
    """A decorator that makes a class of settings known under `name`, a value of `quantization` and of a checkpoint's
    `quant_method`. It replaces what had the name before. ValueError: it is no QuantizationConfig."""

    def register(cls: _Config) -> _Config:
        if not issubclass(cls, QuantizationConfig):
            raise ValueError(f"{cls.__name__} must be a subclass of QuantizationConfig to be registered as {name!r}")
        if name in QUANTIZATION_METHODS:
            logger.debug("The quantization method '%s' already exists and will be overwritten", name)
        else:
            QUANTIZATION_METHODS.append(name)
        _registered[name] = cls
        return cls

    return register


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    """The class of settings called so. ValueError: there is none."""
    if quantization in _registered:
        return _registered[quantization]
    if quantization not in STORED:
        known = ", ".join(sorted(QUANTIZATION_METHODS))
        raise ValueError(f"Invalid quantization method: {quantization!r} is none of {known}")
    return stored_format(quantization)


@cache
def stored_format(name: str) -> type[StoredConfig]:
    """The class of a format of checkpoints: the one in the file of its name that has this name."""
    module = import_module(f"{__name__}.formats.{name.replace('-', '_')}")
    found: Any = next(value for value in vars(module).values() if getattr(value, "name", None) == name)
    return found


def stored_formats() -> list[type[StoredConfig]]:
    """All formats of checkpoints, sorted by name."""
    return [stored_format(name) for name in STORED]


def is_registered(name: object) -> bool:
    """Whether a user's class has the name."""
    return name in _registered


def registered_files() -> list[str]:
    """The files that registered classes read their settings from."""
    return [file for cls in _registered.values() for file in cls.get_config_filenames()]

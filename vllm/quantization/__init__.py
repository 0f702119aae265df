"""Quantisations by name: the formats of checkpoints here, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.quantization.base_config import QuantizationConfig

logger = init_logger(__name__)

_Config = TypeVar("_Config", bound=type[QuantizationConfig])

QuantizationMethods = str
"""Upstream's type of a name; here registered ones are names, too."""

# Where the formats of checkpoints are.
_FORMATS = {
    "auto-round": ("auto_round", "AutoRoundConfig"),
    "awq": ("awq", "AWQConfig"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytesConfig"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensorsConfig"),
    "fp8": ("fp8", "Fp8Config"),
    "gguf": ("gguf", "GGUFConfig"),
    "gptq": ("gptq", "GPTQConfig"),
    "modelopt": ("modelopt", "ModelOptConfig"),
    "mxfp4": ("mxfp4", "Mxfp4Config"),
    "squeezellm": ("squeezellm", "SqueezeLLMConfig"),
    "torchao": ("torchao", "TorchAOConfig"),
}
QUANTIZATION_METHODS = list(_FORMATS)
"""The names of formats, and those that are registered."""

_registered: dict[str, type[QuantizationConfig]] = {}


def register_quantization_config(name: str) -> Callable[[_Config], _Config]:
    """A decorator that makes a class of settings known under `name`, a value of `quantization` and of a checkpoint's
    `quant_method`. It replaces what had the name before. ValueError: it is no QuantizationConfig."""

    def register(cls: _Config) -> _Config:
        if not issubclass(cls, QuantizationConfig):
            raise ValueError(f"{cls.__name__} must be a subclass of QuantizationConfig to be registered as {name!r}")
        if name in _FORMATS or name in _registered:
            logger.debug("The quantization method '%s' already exists and will be overwritten", name)
        _registered[name] = cls
        if name not in QUANTIZATION_METHODS:
            QUANTIZATION_METHODS.append(name)
        return cls

    return register


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    """The class of settings called so. ValueError: there is none."""
    if quantization in _registered:
        return _registered[quantization]
    if quantization not in _FORMATS:
        known = ", ".join(sorted({*_FORMATS, *_registered}))
        raise ValueError(f"Invalid quantization method: {quantization!r} is none of {known}")
    module, name = _FORMATS[quantization]
    config: Any = getattr(import_module(f"{__name__}.formats.{module}"), name)
    return config


def is_registered(name: object) -> bool:
    """Whether a user's class has the name."""
    return name in _registered


def registered_files() -> list[str]:
    """The files that registered classes read their settings from."""
    return [file for cls in _registered.values() for file in cls.get_config_filenames()]

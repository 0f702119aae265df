"""A model folder's quantisation: which it is, and its settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.quantization import ON_LOAD, STORED, canonical_quantization, quantization_error
from vllm.quantization import (
    get_quantization_config,
    is_registered,
    registered_files,
    stored_formats,
)
from vllm.quantization.base_config import QuantizationConfig
from vllm.quantization.setting_values import refuse_transforms, warn_of_unknown
from vllm.quantization.stored import StoredConfig

_IN_CONFIG = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class QuantizationSettings:
    """A checkpoint's.

    Attributes:
        method: its name here, as in `quantization`.
        values: the settings.
        where: the file and the entry, for errors.
    """

    method: str
    values: dict[str, Any]
    where: str


def find_settings(folder: Path, raw: dict[str, Any]) -> QuantizationSettings | None:
    """The settings of the folder's checkpoint, from `raw`, the content of its config.json, or from a file of their own;
    None: it is not quantised.

    Raises:
        ValueError: settings that name no method, or cannot be read.
    """
    for own, prefix in ((raw, ""), (raw.get("text_config"), "text_config.")):
        for key in _IN_CONFIG if isinstance(own, dict) else ():
            values = own.get(key)  # type: ignore[union-attr]
            if values:
                return _settings(values, f"{folder.name}/config.json: {prefix}{key}")
    for name in _settings_files(folder):
        path = folder / name
        if path.is_file():
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{folder.name}/{name} is not JSON: {error}") from None
            return _settings(values, f"{folder.name}/{name}")
    return None


def _settings(values: Any, where: str) -> QuantizationSettings | None:
    if isinstance(values, dict) and isinstance(values.get("quantization"), dict):
        # Model Optimizer's file.
        values, where = values["quantization"], f"{where}: quantization"
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be an object, got {values!r}")
    if "quant_algo" in values and values["quant_algo"] is None:
        # At most the KV cache was quantised.
        return None
    method = values.get("quant_method") or _implied_method(values)
    if method is None:
        raise ValueError(f"{where} has no quant_method; it must be one of {', '.join(STORED)}")
    return QuantizationSettings(canonical_quantization(str(method).lower()), values, where)


def _implied_method(values: dict[str, Any]) -> str | None:
    """The method of settings that leave it out."""
    return next((form.name for form in stored_formats() if form.wrote(values)), None)


def _settings_files(folder: Path) -> list[str]:
    """Names of files that hold the settings in place of config.json; formats are asked where there may be one."""
    asked = stored_formats() if any(folder.glob("*quant*.json")) else ()
    return [*dict.fromkeys(name for form in asked for name in form.files), *registered_files()]


def resolve_quantization(asked: str | None, folder: Path, raw: dict[str, Any]) -> str | None:
    """The quantisation of a folder's model, of which `asked` is what the user said.

    Raises:
        ValueError: the checkpoint has another one, one that is not implemented, or none where one was asked for.
    """
    given, asked = asked, canonical_quantization(asked)
    settings = find_settings(folder, raw)
    if settings is None:
        if asked in STORED and asked not in ON_LOAD:
            raise ValueError(
                f"quantization={given!r}, but {folder.name}/config.json has no quantization_config: its weights "
                f"are not quantised; leave it out, or use one of {', '.join(map(repr, ON_LOAD))}"
            )
        return asked
    if settings.method in ON_LOAD and settings.method not in STORED and not is_registered(settings.method):
        raise ValueError(
            f"{settings.where} has quant_method {settings.method!r}, which is what quantization={settings.method!r} "
            f"does to unquantised weights; a checkpoint's must be one of {', '.join(STORED)}"
        )
    if settings.method not in STORED and not is_registered(settings.method):
        raise ValueError(
            f"{settings.where} of quant_method {settings.values.get('quant_method')!r}: "
            f"{quantization_error(settings.method)}"
        )
    if asked not in (None, settings.method):
        if is_registered(asked):
            return asked
        raise ValueError(
            f"quantization={given!r}, but {settings.where} has quant_method {settings.method!r}: leave quantization out"
        )
    load_quantization(settings.method, folder, raw)
    return settings.method


def load_quantization(method: str | None, folder: Path, raw: dict[str, Any]) -> QuantizationConfig | None:
    """The settings of `method` as its own object; None: it is not one that has any.

    Raises:
        ValueError: settings that cannot be honoured; the message names where they are.
    """
    settings = find_settings(folder, raw)
    if settings is None:
        return get_quantization_config(method).from_config({}) if method is not None and is_registered(method) else None
    name = method or settings.method
    cls = get_quantization_config(name)
    try:
        if not issubclass(cls, StoredConfig):
            return cls.from_config(settings.values)
        refuse_transforms(settings.values)
        config = cls.from_config(settings.values)
    except ValueError as error:
        raise ValueError(f"{settings.where}: {error}") from None
    except (TypeError, AttributeError) as error:
        if is_registered(name):
            raise
        raise ValueError(f"{settings.where} has a value of another kind than {name!r} means: {error}") from error
    if cls.settings is not None:
        warn_of_unknown(cls.settings, settings.values, settings.where)
    return config

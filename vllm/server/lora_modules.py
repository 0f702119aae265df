"""The adapters that --lora-modules names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoRAModulePath:
    """An adapter as --lora-modules names it."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_modules(given: Sequence[str | LoRAModulePath] | None) -> list[LoRAModulePath]:
    """The values of --lora-modules: NAME=PATH, or a JSON object with name, path and base_model_name.

    Raises:
        ValueError: neither, or two of one name.
    """
    found = [each if isinstance(each, LoRAModulePath) else _parse_module(each) for each in given or ()]
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--lora-modules names {twice!r} twice")
    return found


def check_folders(modules: Sequence[LoRAModulePath]) -> None:
    """ValueError: an adapter's folder is not there, or holds none."""
    for each in modules:
        if not Path(each.path, "adapter_config.json").is_file():
            raise ValueError(f"--lora-modules: {each.name!r}: there is no adapter_config.json in {each.path}")


def _parse_module(text: str) -> LoRAModulePath:
    problem = f"--lora-modules takes NAME=PATH or a JSON object with name, path and base_model_name, got {text!r}"
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
            own = LoRAModulePath(**value)
        except (ValueError, TypeError):
            raise ValueError(problem) from None
    else:
        name, _, path = text.partition("=")
        own = LoRAModulePath(name, path)
    if not all(isinstance(each, str) and each for each in (own.name, own.path)):
        raise ValueError(problem)
    return own

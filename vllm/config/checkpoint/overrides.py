"""Entries of config.json that the user replaces: a dict, or a function of transformers' configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Overrides = dict[str, Any] | Callable[[Any], Any] | None


def overridden_entries(overrides: Overrides, folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The entries of config.json that `overrides` sets: itself, or what differs in the configuration that it returns.

    Raises:
        ValueError: the function returns no configuration.
    """
    if not callable(overrides):
        return dict(overrides or {})
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    before = config.to_dict()
    changed = overrides(config)
    if not hasattr(changed, "to_dict"):
        raise ValueError(f"hf_overrides must return the configuration that it got, got a {type(changed).__name__}")
    return _differences(before, changed.to_dict())


def extended(overrides: Overrides, **entries: Any) -> Overrides:
    """`overrides`, and `entries`, which win."""
    if not callable(overrides):
        return {**(overrides or {}), **entries}

    def both(config: Any) -> Any:
        changed = overrides(config)
        changed.update(entries)
        return changed

    return both


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    # A text decoder's entries replace those of its file one by one.
    if isinstance(text := changed.get("text_config"), dict) and isinstance(old := before.get("text_config"), dict):
        changed["text_config"] = _differences(old, text)
    return changed

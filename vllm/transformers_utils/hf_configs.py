"""Configurations as transformers has them, for callers: the engine itself reads config.json without transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

Overrides = dict[str, Any] | Callable[[Any], Any] | None


def get_config(
    model: str | Path, trust_remote_code: bool = False, revision: str | None = None, **kwargs: Any
) -> PretrainedConfig:
    """A model's configuration, as AutoConfig reads it."""
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(
        model, trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )
    return config


def get_hf_text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of it that is of text; the whole where there is no other."""
    found: PretrainedConfig = config.get_text_config()
    return found


def try_get_generation_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> GenerationConfig | None:
    """What its generation_config.json says, or else its configuration; None: neither can be read."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    with contextlib.suppress(OSError):
        return GenerationConfig.from_model_config(get_config(model, trust_remote_code, revision))
    return None


def overridden_entries(overrides: Overrides, folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The entries of config.json that `overrides` sets: itself, or what differs in the configuration that it returns.

    Raises:
        ValueError: the function returns no configuration.
    """
    if not callable(overrides):
        return dict(overrides or {})
    config = get_config(folder, trust_remote_code)
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

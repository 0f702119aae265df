"""Entries of config.json that the user replaces: a dict, or a function of transformers' configuration."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.utils.checks import asks_for_nothing

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


def check_parts(whole: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Check entries of a whole model's parts, such as its vision_config, which transformers would take with any name.

    Args:
        whole: the model's config.json.
        overrides: entries that replace its own.

    Raises:
        ValueError: neither config.json nor transformers' configuration of the part has an option.
    """
    given = {name: value for name, value in overrides.items() if isinstance(value, dict)}
    if not given:
        return
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    try:
        known = CONFIG_MAPPING[whole["model_type"]].from_dict(whole)
    except Exception:  # the overrides may mend it; if not, the error comes where it is read with them
        return
    for name, options in given.items():
        part = getattr(known, name, None)
        if not isinstance(part, PreTrainedConfig):
            continue
        for option, value in options.items():
            if not hasattr(part, option) and not asks_for_nothing(value):
                raise ValueError(
                    f"hf_overrides: {name} has no option {option}, got {value!r}: leave it out; "
                    f"{type(part).__name__} of transformers lists its options"
                )


def names_of_whole(whole: dict[str, Any], names: Set[str]) -> dict[str, str]:
    """The `names` that are options of transformers' configuration of a whole model, and not of every model's, with what
    it calls them."""
    if not names:
        return {}
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if whole.get("model_type") not in CONFIG_MAPPING:
        return {}
    kind = CONFIG_MAPPING[whole["model_type"]]
    known = {each.name for each in fields(kind)} - {each.name for each in fields(PreTrainedConfig)}
    called = {name: kind.attribute_map.get(name, name) for name in names}
    return {name: other for name, other in called.items() if other in known}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    # The entries of these parts replace those of the file one by one.
    for name in ("text_config", "vision_config"):
        if isinstance(part := changed.get(name), dict) and isinstance(old := before.get(name), dict):
            changed[name] = _differences(old, part)
    return changed

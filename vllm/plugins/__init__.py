"""Plug-ins of upstream's groups of entry points. Custom logits processors are loaded from theirs; the others, which
change upstream's insides, are found and not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
IO_PROCESSOR_PLUGINS_GROUP = "vllm.io_processor_plugins"
PLATFORM_PLUGINS_GROUP = "vllm.platform_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"


def load_plugins_by_group(group: str) -> dict[str, Callable[[], Any]]:
    """The functions of a group's entry points, by name; of those that VLLM_PLUGINS names, where it is set. One that
    cannot be imported is left out with a warning."""
    from importlib.metadata import entry_points

    allowed = envs.VLLM_PLUGINS
    found: dict[str, Callable[[], Any]] = {}
    for entry in entry_points(group=group):
        if allowed is not None and entry.name not in allowed:
            continue
        try:
            found[entry.name] = entry.load()
        except Exception:  # a plug-in may fail in any way
            logger.exception("the plug-in %s of %s cannot be imported", entry.name, group)
    return found


def load_general_plugins() -> None:
    """Nothing but a warning that names them: they register models and change modules that are not there."""
    from importlib.metadata import entry_points

    names = sorted(entry.name for entry in entry_points(group=DEFAULT_PLUGINS_GROUP))
    if names:
        warn_once(logger, "plug-ins of %s are not run: %s", DEFAULT_PLUGINS_GROUP, ", ".join(names))

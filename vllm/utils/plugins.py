"""Plug-ins of upstream's groups of entry points. General ones, which register models, run in every process that has an
engine or a part of one; custom logits processors are loaded from a group of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
IO_PROCESSOR_PLUGINS_GROUP = "vllm.io_processor_plugins"
PLATFORM_PLUGINS_GROUP = "vllm.platform_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"

_FAILURES = (Exception, SystemExit)  # a plug-in may fail in any way

_has_loaded_general = False


def load_plugins_by_group(group: str) -> dict[str, Callable[[], Any]]:
    """The functions of a group's entry points, by name; of those that VLLM_PLUGINS names, where it is set. One that
    cannot be imported is left out with a warning."""
    from importlib.metadata import entry_points

    allowed = envs.plugins()
    found: dict[str, Callable[[], Any]] = {}
    for entry in entry_points(group=group):
        if allowed is not None and entry.name not in allowed:
            continue
        try:
            found[entry.name] = entry.load()
        except _FAILURES as error:
            _warn(entry.name, group, error)
    return found


def load_general_plugins() -> None:
    """Call the functions of `vllm.general_plugins`, once a process; they may register models and replace parts of the
    engine. One that fails is left out with a warning."""
    global _has_loaded_general
    if _has_loaded_general:
        return
    # A plug-in may make EngineArgs itself.
    _has_loaded_general = True
    for name, function in load_plugins_by_group(DEFAULT_PLUGINS_GROUP).items():
        logger.info("running the plug-in %s", name)
        try:
            function()
        except _FAILURES as error:
            _warn(name, DEFAULT_PLUGINS_GROUP, error)


def _warn(name: str, group: str, error: BaseException) -> None:
    """The error's text names what the plug-in wanted; where it was raised is shown at the level DEBUG."""
    reason = f"{type(error).__name__}: {error}"
    logger.warning("the plug-in %s of %s fails and is left out: %s", name, group, reason)
    logger.debug("the plug-in %s was called here", name, exc_info=error)

"""Checks of arguments that upstream's calls have beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_integer, check_neutral

PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_TAGS = ("weights", "kv_cache")


def check_executor_class(config: VllmConfig, executor_class: Any) -> None:
    """
    Raises:
        VLLMValidationError: `executor_class` is neither None nor Executor, nor the class that `config` asks for.
    """
    if executor_class is None:
        return
    from vllm.v1.executor.abstract import Executor

    own = Executor.get_class(config)
    if executor_class not in (Executor, own):
        raise VLLMValidationError(
            f"executor_class must be {own.__name__}, which Executor.get_class gives for this configuration; "
            "distributed_executor_backend chooses another",
            "executor_class",
            executor_class,
        )


def check_profile_limits(
    delay_iterations: int | None, max_iterations: int | None, profiler_kwargs: Mapping[str, Any] | None
) -> None:
    """
    Raises:
        VLLMValidationError: one of them asks for something.
    """
    given = {
        "delay_iterations": delay_iterations, "max_iterations": max_iterations, "profiler_kwargs": profiler_kwargs
    }  # fmt: skip
    for name, value in given.items():
        check_neutral(name, value, "profile around the calls of interest")


def check_pause_mode(mode: Any) -> None:
    """
    Raises:
        VLLMValidationError: `mode` is not one of PAUSE_MODES.
    """
    if mode not in PAUSE_MODES:
        raise VLLMValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode", mode)


def check_sleep_level(level: Any) -> None:
    """
    Raises:
        VLLMValidationError: `level` is not 1 or 2.
    """
    check_integer("level", level, 1, 2)


def check_sleep_tags(tags: Any) -> None:
    """
    Raises:
        VLLMValidationError: `tags` is neither None nor a list of SLEEP_TAGS.
    """
    for tag in tags or ():
        if tag not in SLEEP_TAGS:
            raise VLLMValidationError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {tag!r}", "tags", tag)

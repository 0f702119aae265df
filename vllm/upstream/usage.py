"""Upstream's names of what starts an engine. No usage is reported here."""

from __future__ import annotations

from enum import Enum
from typing import Any


class UsageContext(str, Enum):
    """What started an engine."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """False: none are collected."""
    return False


def set_runtime_usage_data(key: str, value: str | int | bool) -> None:
    """Nothing: none are collected."""


class UsageMessage:
    """What upstream reports of an engine. Nothing is."""

    def report_usage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


usage_message = UsageMessage()

"""Upstream's names of what starts an engine. No usage is reported here."""

from __future__ import annotations

from typing import Any

from vllm.config.usage import UsageContext as UsageContext


def is_usage_stats_enabled() -> bool:
    """False: none are collected."""
    return False


def set_runtime_usage_data(key: str, value: str | int | bool) -> None:
    """Nothing: none are collected."""


class UsageMessage:
    """Upstream reports this of an engine. Nothing is reported here."""

    def report_usage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


usage_message = UsageMessage()

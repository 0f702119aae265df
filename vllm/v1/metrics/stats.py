"""What loggers are fed with."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class SchedulerStats(Unserved):
    """Of a step's requests."""

    instead: ClassVar[str] = "read LLM.get_metrics, the server's /metrics, or RequestOutput.metrics"


class IterationStats(Unserved):
    """Of a step."""

    instead: ClassVar[str] = "read LLM.get_metrics, the server's /metrics, or RequestOutput.metrics"

"""Who logs an engine's statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.utils.unserved import Unserved

_READ = "the engine feeds no loggers: read LLM.get_metrics, the server's /metrics, or RequestOutput.metrics"


class StatLoggerBase(ABC):
    """Base of loggers of callers' own. An engine takes none: `stat_loggers` is refused."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """A step's statistics."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready."""

    def log(self) -> None:  # noqa: B027
        """What has come since the last call."""


StatLoggerFactory = Callable[[Any, int], StatLoggerBase]


class AggregateStatLoggerBase(StatLoggerBase):
    """Base of loggers of several engines together."""


class LoggingStatLogger(Unserved):
    """A line of figures every few seconds."""

    instead: ClassVar[str] = _READ


class AggregatedLoggingStatLogger(LoggingStatLogger):
    """The same of several engines together."""


class PrometheusStatLogger(Unserved):
    """Figures for /metrics, which the server has."""

    instead: ClassVar[str] = _READ

"""Loggers of callers' own, which are told of every step of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.metrics.stats import CoreCounts, IterationStats, MultiModalCacheStats, SchedulerStats

logger = init_logger(__name__)


class StatLoggerBase(ABC):
    """Base of loggers; an engine makes one for each of its replicas."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take a step's statistics."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Take notice that the engine is ready."""

    def log(self) -> None:  # noqa: B027
        """Say what has come since the last call."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:  # noqa: B027
        """Take notice of an engine that falls asleep or wakes up."""


StatLoggerFactory = Callable[[VllmConfig, int], StatLoggerBase]


class AggregateStatLoggerBase(StatLoggerBase):
    """Base of loggers of all replicas together; an engine makes one, with their indices."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None: ...


class PerEngineStatLoggerAdapter(AggregateStatLoggerBase):
    """A logger a replica, as one of all."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int], per_engine_stat_logger_factory: Any) -> None:
        self.engine_indexes = engine_indexes
        self.per_engine_stat_loggers = {
            index: per_engine_stat_logger_factory(vllm_config, index) for index in engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self.per_engine_stat_loggers[engine_idx].record(
            scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx
        )

    def log_engine_initialized(self) -> None:
        for each in self.per_engine_stat_loggers.values():
            each.log_engine_initialized()

    def log(self) -> None:
        for each in self.per_engine_stat_loggers.values():
            each.log()


class StatLoggers:
    """The loggers of an engine with so many replicas. What one of them raises is logged, once: requests go on."""

    def __init__(self, config: VllmConfig, factories: Sequence[Any], num_replicas: int = 1) -> None:
        """
        Raises:
            VLLMValidationError: `factories` is no list of callables.
        """
        if not isinstance(factories, Sequence) or not all(map(callable, factories)):
            message = f"stat_loggers must be a list of callables (vllm_config, engine_index), got {factories!r}"
            raise VLLMValidationError(message, "stat_loggers")
        indices = list(range(num_replicas))
        self._loggers: list[Any] = [
            factory(config, indices)
            if isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)
            else PerEngineStatLoggerAdapter(config, indices, factory)
            for factory in factories
        ]
        self._counts = [CoreCounts() for _ in indices]
        self._failed: set[int] = set()
        self._tell("log_engine_initialized")

    def record(self, index: int, stats: Mapping[str, Any], iteration: IterationStats) -> None:
        """Tell of a step of replica `index`; `stats`: EngineCore.stats after it."""
        scheduler = self._counts[index].step(stats, iteration)
        self._tell("record", scheduler, iteration, mm_cache_stats=None, engine_idx=index)

    def log(self) -> None:
        """Have them say what has come."""
        self._tell("log")

    def _tell(self, method: str, *args: Any, **options: Any) -> None:
        for own in self._loggers:
            try:
                getattr(own, method)(*args, **options)
            except Exception:
                if id(own) not in self._failed:
                    self._failed.add(id(own))
                    logger.exception("a stat logger failed in %s", method)

"""Loggers that programs name: to Prometheus' registry of this process, to Ray's metrics, to the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

import prometheus_client
from prometheus_client import REGISTRY

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.core_metrics import adapter_info, cache_info
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, MultiModalCacheStats, SchedulerStats

logger = init_logger(__name__)


def _of_finished(read: Callable[[FinishedRequestStats], float]) -> Callable[[IterationStats], Iterable[float]]:
    """The values that histograms have of sequences that ended with their last output."""
    return lambda step: [read(each) for each in step.finished_requests if each.e2e_latency]


# Metrics of EngineMetrics -> what a step adds to them.
_OF_A_STEP: dict[str, Callable[[IterationStats], Iterable[float]]] = {
    "vllm:prompt_tokens": lambda step: [step.prompt_token_stats.total],
    "vllm:prompt_tokens_cached": lambda step: [step.prompt_token_stats.cached_tokens],
    "vllm:generation_tokens": lambda step: [step.num_generation_tokens],
    "vllm:time_to_first_token_seconds": lambda step: step.time_to_first_tokens_iter,
    "vllm:inter_token_latency_seconds": lambda step: step.inter_token_latencies_iter,
    "vllm:request_time_per_output_token_seconds": lambda step: [
        each.mean_time_per_output_token for each in step.finished_requests if each.num_generation_tokens > 1
    ],
    "vllm:e2e_request_latency_seconds": _of_finished(lambda own: own.e2e_latency),
    "vllm:request_queue_time_seconds": _of_finished(lambda own: own.queued_time),
    "vllm:request_prefill_time_seconds": _of_finished(lambda own: own.prefill_time),
    "vllm:request_decode_time_seconds": _of_finished(lambda own: own.decode_time),
    "vllm:request_inference_time_seconds": _of_finished(lambda own: own.inference_time),
    "vllm:request_prompt_tokens": _of_finished(lambda own: own.num_prompt_tokens),
    "vllm:request_prefill_kv_computed_tokens": _of_finished(lambda own: own.num_prompt_tokens - own.num_cached_tokens),
    "vllm:request_generation_tokens": _of_finished(lambda own: own.num_generation_tokens),
    "vllm:request_max_num_generation_tokens": lambda step: step.max_num_generation_tokens_iter,
    "vllm:request_params_max_tokens": _of_finished(lambda own: own.max_tokens_param or 0),
    "vllm:request_params_n": lambda step: step.n_params_iter,
    "vllm:iteration_tokens_total": lambda step: [step.prompt_token_stats.computed + step.num_generation_tokens],
}
_GAUGES: dict[str, tuple[str, Callable[[SchedulerStats], float]]] = {
    "vllm:num_requests_running": ("Sequences in the batch", lambda now: now.num_running_reqs),
    "vllm:num_requests_waiting": ("Sequences that wait for a place in the batch", lambda now: now.num_waiting_reqs),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it", lambda now: now.kv_cache_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[SchedulerStats], float]]] = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up", lambda now: now.prefix_cache_stats.queries),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda now: now.prefix_cache_stats.hits),
}
_OF_DRAFTS = {
    "vllm:spec_decode_num_drafts": ("Drafts that were checked", "num_drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Their tokens", "num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Those of them that were right", "num_accepted_tokens"),
}


class PrometheusStatLogger(AggregateStatLoggerBase):
    """Fills metrics of upstream's names, labelled with the model and the replica, in prometheus_client's own registry.

    A later one takes the place of those that were there before. Subclasses may have other classes of metrics, which
    are made and filled in the same way.
    """

    _gauge_cls: ClassVar[Any] = prometheus_client.Gauge
    _counter_cls: ClassVar[Any] = prometheus_client.Counter
    _histogram_cls: ClassVar[Any] = prometheus_client.Histogram

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """`engine_indexes`: of the replicas; None: of one."""
        self.vllm_config = vllm_config
        self.engine_indexes = engine_indexes or [0]
        self._unregister_vllm_metrics()
        model = vllm_config.model_config
        self._model_name = model.served_model_name[0] if model.served_model_name else model.model
        labels = ["model_name", "engine"]
        self._metrics: dict[str, Any] = {}
        for family in EngineMetrics(model.max_model_len).registry._collector_to_names:
            name, text = family._name, family._documentation  # type: ignore[attr-defined]
            if name in _OF_A_STEP:
                bounds = getattr(family, "_upper_bounds", None)
                kind, options = (
                    (self._counter_cls, {})
                    if bounds is None
                    else (self._histogram_cls, {"buckets": [bound for bound in bounds if bound != float("inf")]})
                )
                self._metrics[name] = kind(name=name, documentation=text, labelnames=labels, **options)
        for name, (text, _) in _GAUGES.items():
            self._metrics[name] = self._gauge_cls(name=name, documentation=text, labelnames=labels)
        counters = {**{name: text for name, (text, _) in (_COUNTERS | _OF_DRAFTS).items()}}
        counters["vllm:num_preemptions"] = "Times that a running request lost its place and was to start again"
        for name, text in counters.items():
            self._metrics[name] = self._counter_cls(name=name, documentation=text, labelnames=labels)
        self._metrics["vllm:request_success"] = self._counter_cls(
            name="vllm:request_success",
            documentation="Sequences that ended, by reason",
            labelnames=[*labels, "finished_reason"],
        )
        self._infos: dict[str, Any] = {}
        self._adapters: dict[str, str] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        labels = (self._model_name, str(engine_idx))
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats, labels)
        if iteration_stats is None:
            return
        for name, values in _OF_A_STEP.items():
            metric = self._metrics[name].labels(*labels)
            for value in values(iteration_stats):
                if hasattr(metric, "observe"):
                    if value or name != "vllm:iteration_tokens_total":
                        metric.observe(value)
                elif value:
                    metric.inc(value)
        if iteration_stats.num_preempted_reqs:
            self._metrics["vllm:num_preemptions"].labels(*labels).inc(iteration_stats.num_preempted_reqs)
        for each in iteration_stats.finished_requests:
            self._metrics["vllm:request_success"].labels(*labels, str(each.finish_reason)).inc()

    def _record_scheduler(self, now: SchedulerStats, labels: tuple[str, str]) -> None:
        for name, (_, read) in _GAUGES.items():
            self._metrics[name].labels(*labels).set(read(now))
        for name, (_, read) in _COUNTERS.items():
            if count := read(now):
                self._metrics[name].labels(*labels).inc(count)
        if now.spec_decoding_stats is not None:
            for name, (_, field) in _OF_DRAFTS.items():
                if count := getattr(now.spec_decoding_stats, field):
                    self._metrics[name].labels(*labels).inc(count)
        names = {"running": tuple(now.running_lora_adapters), "waiting": tuple(now.waiting_lora_adapters)}
        found = adapter_info(self.vllm_config.lora_config, {f"{kind}_adapters": own for kind, own in names.items()})
        for family in found:
            self._show_info(family, {"engine": labels[1]}, time.time())

    def log_engine_initialized(self) -> None:
        cache = self.vllm_config.cache_config
        for index in self.engine_indexes:
            self._show_info(cache_info(cache.num_gpu_blocks or 0, cache), {"engine": str(index)}, 1)

    def _show_info(self, family: Any, further: dict[str, str], value: float) -> None:
        """Set a gauge whose labels are what it says."""
        (sample,) = family.samples
        labels = {**sample.labels, **further}
        if family.name not in self._infos:
            self._infos[family.name] = self._gauge_cls(
                name=family.name, documentation=family.documentation, labelnames=list(labels)
            )
        self._infos[family.name].labels(**labels).set(value)

    @staticmethod
    def _unregister_vllm_metrics() -> None:
        unregister_vllm_metrics()


def unregister_vllm_metrics() -> None:
    """Take the engine's metrics out of prometheus_client's registry of this process."""
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith("vllm:"):
            with suppress(KeyError):
                REGISTRY.unregister(collector)


class _RayMetric:
    """One of ray.util.metrics, called as prometheus_client's are. Ray's names have no colons."""

    _kind: ClassVar[str]

    def __init__(self, name: str, documentation: str = "", labelnames: Iterable[str] = (), **options: Any) -> None:
        """ImportError: Ray is not installed."""
        from ray.util import metrics

        self._labels = tuple(labelnames)
        self._tags = {"ReplicaId": _replica_id()}
        # OpenTelemetry's rule, which Ray checks.
        own_name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        make = getattr(metrics, self._kind)
        self._metric = make(own_name, documentation, tag_keys=(*self._labels, "ReplicaId"), **options)

    def labels(self, *values: Any, **named: Any) -> Any:
        """It, with these labels' values."""
        if len(values) + len(named) != len(self._labels):
            raise ValueError(f"there are {len(self._labels)} labels: {', '.join(self._labels)}")
        own = object.__new__(type(self))
        tags = {**dict(zip(self._labels, values, strict=False)), **named}
        own.__dict__ = {**self.__dict__, "_tags": {**self._tags, **{name: str(value) for name, value in tags.items()}}}
        return own


class RayGaugeWrapper(_RayMetric):
    """A gauge of Ray's. Arguments about processes of prometheus_client change nothing: Ray's metrics have each's."""

    _kind = "Gauge"

    def __init__(
        self, name: str, documentation: str = "", labelnames: Iterable[str] = (), multiprocess_mode: str = ""
    ) -> None:
        super().__init__(name, documentation, labelnames)

    def set(self, value: float) -> None:
        self._metric.set(value, tags=self._tags)

    def set_to_current_time(self) -> None:
        self.set(time.time())


class RayCounterWrapper(_RayMetric):
    """A counter of Ray's."""

    _kind = "Counter"

    def inc(self, value: float = 1.0) -> None:
        if value:
            self._metric.inc(value, tags=self._tags)


class RayHistogramWrapper(_RayMetric):
    """A histogram of Ray's."""

    _kind = "Histogram"

    def __init__(
        self,
        name: str,
        documentation: str = "",
        labelnames: Iterable[str] = (),
        buckets: Iterable[float] | None = None,
    ) -> None:
        # Ray's bounds are above 0.
        super().__init__(
            name, documentation, labelnames, boundaries=[float(each) for each in buckets or () if each > 0]
        )

    def observe(self, value: float) -> None:
        self._metric.observe(value, tags=self._tags)


class RayPrometheusStatLogger(PrometheusStatLogger):
    """The same metrics as Ray's, which its nodes export: `vllm:NAME` is `vllm_NAME` there, with the Serve replica as
    ReplicaId."""

    _gauge_cls = RayGaugeWrapper
    _counter_cls = RayCounterWrapper
    _histogram_cls = RayHistogramWrapper

    @staticmethod
    def _unregister_vllm_metrics() -> None:
        """Nothing: Ray's metrics of one name are one."""


def _replica_id() -> str:
    """Ray Serve's name of the replica; "" elsewhere."""
    try:
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id
    except Exception:  # Serve is not installed, or this is no replica
        return ""


class LoggingStatLogger(StatLoggerBase):
    """Logs a line of what has come, at each call of `log` (AsyncLLM.do_log_stats)."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config, self.engine_index = vllm_config, engine_index
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._num_prompt_tokens = self._num_generation_tokens = self._num_queries = self._num_hits = 0
        self._now = SchedulerStats()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.num_prompt_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._now = scheduler_stats
            self._num_queries += scheduler_stats.prefix_cache_stats.queries
            self._num_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        blocks = self.vllm_config.cache_config.num_gpu_blocks
        logger.info("engine %d has %s KV blocks", self.engine_index, blocks)

    def log(self) -> None:
        seconds = max(time.monotonic() - self._since, 1e-9)
        now = self._now
        logger.info(
            "engine %d: %.1f prompt tokens/s, %.1f generated tokens/s, %d sequences run, %d wait, KV cache %.1f%%, "
            "prefix cache hit rate %.1f%%",
            self.engine_index,
            self._num_prompt_tokens / seconds,
            self._num_generation_tokens / seconds,
            now.num_running_reqs,
            now.num_waiting_reqs,
            100 * now.kv_cache_usage,
            100 * self._num_hits / max(self._num_queries, 1),
        )
        self._begin()
        self._now = now

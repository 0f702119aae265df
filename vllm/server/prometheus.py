"""Metrics for Prometheus, of an engine and of HTTP requests; docs/metrics.md explains each one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from vllm.v1.metrics.core_metrics import adapter_info, add, cache_info, core_metrics, sleep_state

if TYPE_CHECKING:
    from vllm.entrypoints.async_llm import AsyncLLM


class EngineCollector(Collector):
    """The metrics of an engine and its processes, as of the last steps whose outputs have come: it never waits."""

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        cache_config = self._engine.vllm_config.cache_config
        families: dict[str, Metric] = {}
        for index, replica in enumerate(self._engine.replicas):
            engine = {"engine": str(index)}
            labels = {"model_name": self._model_name, **engine}
            add(families, [cache_info(replica.core.num_blocks, cache_config)], engine)
            add(families, adapter_info(self._engine.vllm_config.lora_config, replica.stats), engine)
            add(families, core_metrics(replica), labels)
            add(families, [sleep_state(self._engine.sleep_level)], labels)
            add(families, replica.metrics.registry.collect(), labels)
        for collector in (ProcessCollector(registry=None), PlatformCollector(registry=None)):
            add(families, collector.collect(), {})
        for index, pid in enumerate(self._engine.core_pids):
            process = ProcessCollector("vllm_engine_core", pid=partial(int, pid), registry=None)
            add(families, process.collect(), {"engine": str(index)})
        return iter(families.values())


def make_registry(engine: AsyncLLM, model_name: str) -> CollectorRegistry:
    """The metrics of the engine, this process and the engine cores' processes, labelled with `model_name`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model_name))
    GCCollector(registry)
    return registry


_UNKNOWN = "none"
"""Handler of requests without a route: paths of clients' invention would be labels without end."""


class HttpMetrics(Collector):
    """Metrics of a server's requests. Belongs to its event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("method", "handler")
        self._requests = Counter(
            "http_requests_total", "Requests that were answered", (*labels, "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer",
            labels,
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10),
            registry=self._registry,
        )
        self._tokens = Counter(
            "vllm:http_prompt_tokens_total", "Prompt tokens of requests", labels, registry=self._registry
        )
        self._rejections = Counter(
            "vllm:admission_rejections_total",
            "Requests that a limit of the queue refused",
            ("model_name", "reason"),
            registry=self._registry,
        )

    def count(self, scope: Scope, record: dict[str, Any]) -> None:
        """Add a request that has ended; `record` is its entry in the access log."""
        route = scope.get("route")
        labels = (record["method"], getattr(route, "path", _UNKNOWN))
        self._requests.labels(*labels, f"{record['status'] // 100}xx").inc()
        self._seconds.labels(*labels).observe(record["ms"] / 1000)
        if record["prompt_tokens"]:
            self._tokens.labels(*labels).inc(record["prompt_tokens"])

    def count_full(self, model_name: str) -> None:
        """Add a request that the queue had no room for."""
        self._rejections.labels(model_name, "max_num_queued_reqs").inc()

    def collect(self) -> Iterable[Metric]:
        """For a registry."""
        return self._registry.collect()

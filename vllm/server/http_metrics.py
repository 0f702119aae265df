"""Counts and times of HTTP requests by endpoint, under the names that upstream's dashboards know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

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

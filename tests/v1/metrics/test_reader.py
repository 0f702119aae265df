"""Metrics as Python values: those that our registries hold."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram
from prometheus_client.core import CounterMetricFamily

from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.reader import (
    ACCEPTED_BY_POSITION,
    Counter,
    Gauge,
    Histogram,
    Metric,
    Vector,
    get_metrics_snapshot,
    snapshot,
)


def test_each_kind():
    registry = CollectorRegistry()
    PromCounter("vllm:tokens", "d", ["engine"], registry=registry).labels("0").inc(3)
    PromGauge("vllm:running", "d", registry=registry).set(1.5)
    histogram = PromHistogram("vllm:seconds", "d", ["engine"], buckets=(1, 2), registry=registry)
    histogram.labels("0").observe(0.5)
    histogram.labels("0").observe(1.5)
    histogram.labels("1").observe(9)
    PromCounter("other", "d", registry=registry).inc()
    found = {(metric.name, metric.labels.get("engine")): metric for metric in get_metrics_snapshot(registry)}
    assert found == {
        ("vllm:tokens", "0"): Counter("vllm:tokens", {"engine": "0"}, 3),
        ("vllm:running", None): Gauge("vllm:running", {}, 1.5),
        ("vllm:seconds", "0"): Histogram("vllm:seconds", {"engine": "0"}, 2, 2.0, {"1.0": 1, "2.0": 2, "+Inf": 2}),
        ("vllm:seconds", "1"): Histogram("vllm:seconds", {"engine": "1"}, 1, 9.0, {"1.0": 0, "2.0": 0, "+Inf": 1}),
    }
    assert all(isinstance(metric, Metric) for metric in found.values())


def test_counts_by_position():
    family = CounterMetricFamily(f"vllm:{ACCEPTED_BY_POSITION}", "d", labels=["engine", "position"])
    for engine, values in (("0", (7, 4, 1)), ("1", (2,))):
        for position, value in enumerate(values):
            family.add_metric([engine, str(position)], value)
    assert snapshot([family]) == [
        Vector(f"vllm:{ACCEPTED_BY_POSITION}", {"engine": "0"}, [7, 4, 1]),
        Vector(f"vllm:{ACCEPTED_BY_POSITION}", {"engine": "1"}, [2]),
    ]


def test_an_engines_registry_is_read():
    metrics = EngineMetrics(128)
    metrics.observe_request(2, 7)
    found = {metric.name: metric for metric in get_metrics_snapshot(metrics.registry)}
    assert found["vllm:request_params_n"].sum == 2
    assert found["vllm:request_success"].value == 0
    assert all(name.startswith("vllm:") for name in found)


def test_without_an_engine_there_is_nothing():
    assert get_metrics_snapshot() == []

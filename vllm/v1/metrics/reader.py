"""Metrics as Python values: what a program in the engine's process reads in place of the text of /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_PREFIX = "vllm:"
ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """One metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A metric that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts by position: tokens that were right, by their place in a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A metric that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """How values are distributed: `buckets` counts, by its upper bound, those that are not above it."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry | None = None) -> list[Metric]:
    """The metrics whose names begin with "vllm:", as they are now.

    Args:
        registry: an engine's; None: prometheus_client's own, where no engine of ours puts anything.
    """
    if registry is None:
        import prometheus_client

        registry = prometheus_client.REGISTRY
    return snapshot(registry.collect())


def snapshot(families: Iterable[Any]) -> list[Metric]:
    """The metrics of prometheus_client's families whose names begin with "vllm:"."""
    found: list[Metric] = []
    for family in families:
        if not family.name.startswith(_PREFIX):
            continue
        if family.name == _PREFIX + ACCEPTED_BY_POSITION:
            found += _vectors(family.name, family.samples)
        elif family.type == "counter":
            found += [
                Counter(family.name, sample.labels, int(sample.value))
                for sample in family.samples
                if sample.name == f"{family.name}_total"
            ]
        elif family.type == "gauge":
            found += [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
        elif family.type == "histogram":
            found += _histograms(family.name, family.samples)
    return found


def _vectors(name: str, samples: Iterable[Any]) -> list[Metric]:
    made: dict[tuple[tuple[str, str], ...], Vector] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "position"}
        vector = made.setdefault(tuple(sorted(labels.items())), Vector(name, labels, []))
        vector.values.append(int(sample.value))
    return list(made.values())


def _histograms(name: str, samples: Iterable[Any]) -> list[Metric]:
    made: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        histogram = made.setdefault(tuple(sorted(labels.items())), Histogram(name, labels, 0, 0.0, {}))
        if sample.name == f"{name}_bucket":
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name == f"{name}_count":
            histogram.count = int(sample.value)
        elif sample.name == f"{name}_sum":
            histogram.sum = sample.value
    return list(made.values())

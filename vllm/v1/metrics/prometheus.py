"""An engine's metrics for Prometheus; docs/metrics.md explains each one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm.config import CacheConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.replica import Replica

_CORE_COUNTERS = (
    ("prefix_cache_queries", "num_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "num_prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("num_preemptions", "num_preemptions", "Times that a running request lost its place and was to start again"),
    ("kv_blocks_swapped_out", "num_swapped_out_blocks", "KV blocks copied to the host's memory as they made room"),
    ("kv_blocks_swapped_in", "num_swapped_in_blocks", "KV blocks copied back, instead of computed again"),
    ("readings_seconds", "readings_seconds", "Seconds spent reading logits for logprobs, in the device's time"),
)
_COLLECTIVE_COUNTERS = (
    ("tp_collective_bytes", "collective_bytes", "Bytes that tensor-parallel rank 0 has handed over, by collective"),
    ("tp_collective_calls", "collective_calls", "Collectives that tensor-parallel rank 0 took part in"),
)
_COLLECTIVES = ("all_reduce", "all_gather", "gather", "broadcast")


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
            _add(families, [_cache_info(replica, cache_config)], engine)
            _add(families, _core_metrics(replica), labels)
            _add(families, replica.metrics.registry.collect(), labels)
        _add(families, ProcessCollector(registry=None).collect(), {})
        for index, pid in enumerate(self._engine.core_pids):
            process = ProcessCollector("vllm_engine_core", pid=partial(int, pid), registry=None)
            _add(families, process.collect(), {"engine": str(index)})
        return iter(families.values())


def _add(families: dict[str, Metric], metrics: Iterable[Metric], labels: dict[str, str]) -> None:
    """Add the samples of `metrics`, with `labels`, to the families of the same names."""
    for metric in metrics:
        family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        for sample in metric.samples:
            # The time of creation is that of the process.
            if not sample.name.endswith("_created"):
                family.samples.append(sample._replace(labels={**labels, **sample.labels}))


def _core_metrics(replica: Replica) -> Iterator[Metric]:
    # A dead core holds nothing, whatever its last counts.
    now = {} if replica.is_dead else replica.stats
    running = now.get("num_running", 0)
    # The core's counts lack the requests that came since the last step.
    waiting = max(now.get("num_waiting", 0), replica.num_unfinished_sequences - running)
    for name, value, help_text in (
        ("num_requests_running", running, "Sequences in the batch, as of the last step"),
        ("num_requests_waiting", waiting, "Sequences that wait for a place in the batch"),
        ("kv_cache_usage_perc", now.get("kv_cache_usage", 0.0), "Share of the KV cache in use; 1 is all of it"),
        ("cpu_cache_usage_perc", now.get("host_cache_usage", 0.0), "Share of the swap space in use; 1 is all"),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", help_text, value)
    for name, source, help_text in _CORE_COUNTERS:
        yield CounterMetricFamily(f"vllm:{name}", help_text, replica.stats.get(source, 0))
    for name, source, help_text in _COLLECTIVE_COUNTERS:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=["collective"])
        for collective, value in {**dict.fromkeys(_COLLECTIVES, 0), **replica.stats.get(source, {})}.items():
            family.add_metric([collective], value)
        yield family


def _cache_info(replica: Replica, config: CacheConfig) -> Metric:
    names = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
    values = {**{name: getattr(config, name) for name in names}, "num_gpu_blocks": replica.core.num_blocks}
    gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache; always 1", labels=tuple(values))
    gauge.add_metric(tuple(map(str, values.values())), 1)
    return gauge


def make_registry(engine: AsyncLLM, model_name: str) -> CollectorRegistry:
    """The metrics of the engine, this process and the engine cores' processes, labelled with `model_name`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model_name))
    return registry

"""An engine's metrics as Prometheus takes them; docs/metrics.md says what each one means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm.config import CacheConfig
from vllm.v1.metrics.engine_metrics import Histogram

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.replica import Replica

_LABELS = ("model_name", "engine")
"""The second is the replica's number."""

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
_COUNTERS = (
    ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of requests whose prompt is done, cached ones included"),
    ("prompt_tokens_cached", "num_cached_prompt_tokens", "Those of them that came from the prefix cache"),
    ("generation_tokens", "num_generated_tokens", "Tokens generated"),
    ("logprob_rows_read", "num_rows_read", "Positions, of prompts and generated, that were read for logprobs"),
    ("logprob_token_ids_read", "num_token_ids_read", "Requested token ids read, one for each id and position"),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token or reading"),
    ("inter_token_latency_seconds", "inter_token_latency", "Between two tokens of a sequence"),
    ("request_time_per_output_token_seconds", "time_per_output_token", "A sequence's mean time of a further token"),
    ("e2e_request_latency_seconds", "e2e_latency", "From arrival to the last token"),
    ("request_queue_time_seconds", "queue_time", "From arrival to the first step"),
    ("request_prefill_time_seconds", "prefill_time", "From the first step to the first token"),
    ("request_decode_time_seconds", "decode_time", "From the first token to the last"),
    ("request_inference_time_seconds", "inference_time", "From the first step to the last token"),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a sequence"),
    (
        "request_prefill_kv_computed_tokens",
        "request_computed_prompt_tokens",
        "Prompt tokens of a sequence that the prefix cache did not have",
    ),
    ("request_generation_tokens", "request_generated_tokens", "Generated tokens of a sequence"),
    (
        "request_max_num_generation_tokens",
        "request_longest_sequence",
        "Generated tokens of each request in its longest sequence",
    ),
    ("request_params_max_tokens", "request_max_tokens", "max_tokens of a sequence"),
    ("request_params_n", "request_num_sequences", "n of each request"),
    ("iteration_tokens_total", "step_tokens", "Tokens that a step completed: computed prompts and generated tokens"),
)


class EngineCollector(Collector):
    """Makes the metrics of an engine when somebody asks, from what it has counted. It never waits for the engine."""

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All metrics as of the last steps that the replicas have told of."""
        config = self._engine.vllm_config.cache_config
        replicas = enumerate(self._engine.replicas)
        return _merge(_Replica(replica, config, self._model_name, str(index)).collect() for index, replica in replicas)


class CoreProcessCollector(Collector):
    """Makes the metrics of the replicas' processes."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """What the system knows of each process."""
        return _merge(_process_metrics(pid, str(index)) for index, pid in enumerate(self._engine.core_pids))


class _Replica:
    """The metrics of one."""

    def __init__(self, replica: Replica, cache_config: CacheConfig, model_name: str, engine: str) -> None:
        self._replica = replica
        self._cache = cache_config
        self._engine = engine
        self._labels = (model_name, engine)

    def collect(self) -> Iterator[Metric]:
        yield self._cache_config()
        yield from self._gauges()
        stats, metrics = self._replica.stats, self._replica.metrics
        for name, source, help_text in _CORE_COUNTERS:
            yield self._counter(name, help_text, stats.get(source, 0))
        for name, source, help_text in _COUNTERS:
            yield self._counter(name, help_text, getattr(metrics, source))
        for name, source, help_text in _COLLECTIVE_COUNTERS:
            values = {**dict.fromkeys(_COLLECTIVES, 0), **stats.get(source, {})}
            yield self._counter_by("collective", name, help_text, values)
        ends = "Sequences that ended, by reason"
        yield self._counter_by("finished_reason", "request_success", ends, metrics.num_finished)
        for name, source, help_text in _HISTOGRAMS:
            yield self._histogram(name, help_text, getattr(metrics, source))

    def _gauges(self) -> Iterator[Metric]:
        replica = self._replica
        # A dead one holds nothing, whatever it told last.
        stats = {} if replica.is_dead else replica.stats
        running = stats.get("num_running", 0)
        # What came since the last step is not in its counts.
        waiting = max(stats.get("num_waiting", 0), replica.num_unfinished_sequences - running)
        for name, value, help_text in (
            ("num_requests_running", running, "Sequences in the batch, as of the last step"),
            ("num_requests_waiting", waiting, "Sequences that wait for a place in the batch"),
            ("kv_cache_usage_perc", stats.get("kv_cache_usage", 0.0), "Share of the KV cache in use; 1 is all of it"),
            ("cpu_cache_usage_perc", stats.get("host_cache_usage", 0.0), "Share of the swap space in use; 1 is all"),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _counter_by(self, label: str, name: str, help_text: str, values: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=(*_LABELS, label))
        for key, value in values.items():
            counter.add_metric((*self._labels, key), value)
        return counter

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(self._labels, buckets, histogram.sum)
        return family

    def _cache_config(self) -> Metric:
        values = {
            "block_size": self._cache.block_size,
            "enable_prefix_caching": self._cache.enable_prefix_caching,
            "gpu_memory_utilization": self._cache.gpu_memory_utilization,
            "swap_space": self._cache.swap_space,
            "num_gpu_blocks": self._replica.core.num_blocks,
            "engine": self._engine,
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache; always 1", labels=tuple(values))
        gauge.add_metric(tuple(map(str, values.values())), 1)
        return gauge


def _process_metrics(pid: int, engine: str) -> Iterator[Metric]:
    for metric in ProcessCollector(namespace="vllm_engine_core", pid=lambda: pid, registry=None).collect():
        metric.samples = [each._replace(labels={**each.labels, "engine": engine}) for each in metric.samples]
        yield metric


def _merge(sources: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
    """One family of each name, with the samples of all."""
    families: dict[str, Metric] = {}
    for source in sources:
        for metric in source:
            family = families.setdefault(metric.name, metric)
            if family is not metric:
                family.samples += metric.samples
    return iter(families.values())


def make_registry(engine: AsyncLLM, model_name: str) -> CollectorRegistry:
    """The engine's metrics, with those of this process and of the engine cores'.

    Args:
        engine: whose metrics.
        model_name: stands in their labels.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model_name))
    ProcessCollector(registry=registry)
    registry.register(CoreProcessCollector(engine))
    return registry

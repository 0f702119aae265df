"""An engine core's counts, as Prometheus' families of metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from vllm.config import CacheConfig, LoRAConfig
from vllm.v1.metrics.reader import ACCEPTED_BY_POSITION


class CoreState(Protocol):
    """A core and its requests, as of its last step."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def stats(self) -> Mapping[str, Any]: ...

    @property
    def num_unfinished_sequences(self) -> int: ...


_CORE_COUNTERS = (
    ("prefix_cache_queries", "num_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "num_prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("num_preemptions", "num_preemptions", "Times that a running request lost its place and was to start again"),
    ("kv_blocks_swapped_out", "num_swapped_out_blocks", "KV blocks copied to the host's memory as they made room"),
    ("kv_blocks_swapped_in", "num_swapped_in_blocks", "KV blocks copied back, instead of computed again"),
    ("kv_blocks_stored", "num_stored_blocks", "KV blocks written to the store on disk"),
    ("kv_blocks_loaded", "num_loaded_blocks", "KV blocks read from there, instead of computed"),
    ("external_prefix_cache_queries", "num_external_queried_tokens", "Prompt tokens looked up in the store on disk"),
    ("external_prefix_cache_hits", "num_external_hit_tokens", "Those that were read from there"),
    ("spec_decode_num_drafts", "num_drafts", "Drafts that were checked, one a request and step"),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Their tokens"),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Those of them that were right"),
    ("readings_seconds", "readings_seconds", "Seconds spent reading logits for logprobs, in the device's time"),
)
_COLLECTIVE_COUNTERS = (
    ("tp_collective_bytes", "collective_bytes", "Bytes that tensor-parallel rank 0 has handed over, by collective"),
    ("tp_collective_calls", "collective_calls", "Collectives that tensor-parallel rank 0 took part in"),
)
# Dashboards made for upstream ask for them.
_NEVER = (
    ("mm_cache_queries", "Lookups of processed pictures: they are not counted"),
    ("mm_cache_hits", "Those found there"),
    ("prompt_tokens_recomputed", "Cached prompt tokens that are computed again: the last one is never cached"),
)
_COLLECTIVES = ("all_reduce", "all_gather", "gather", "broadcast")


def add(families: dict[str, Metric], metrics: Iterable[Metric], labels: dict[str, str]) -> None:
    """Add the samples of `metrics`, with `labels`, to the families of the same names."""
    for metric in metrics:
        family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        for sample in metric.samples:
            # The time of creation is that of the process.
            if not sample.name.endswith("_created"):
                family.samples.append(sample._replace(labels={**labels, **sample.labels}))


def core_metrics(engine: CoreState) -> Iterator[Metric]:
    """The core's counters and gauges."""
    # A dead core holds nothing, whatever its last counts.
    now = {} if engine.is_dead else engine.stats
    running = now.get("num_running", 0)
    # The core's counts lack the requests that came since the last step.
    preparing = now.get("num_preparing", 0)
    waiting = max(now.get("num_waiting", 0) + preparing, engine.num_unfinished_sequences - running)
    for name, value, help_text in (
        ("num_requests_running", running, "Sequences in the batch, as of the last step"),
        ("num_requests_waiting", waiting, "Sequences that wait for a place in the batch"),
        ("kv_cache_usage_perc", now.get("kv_cache_usage", 0.0), "Share of the KV cache in use; 1 is all of it"),
        ("cpu_cache_usage_perc", now.get("host_cache_usage", 0.0), "Share of the swap space in use; 1 is all"),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", help_text, value)
    reasons = {"capacity": waiting - preparing, "deferred": preparing}
    yield _by_label(
        GaugeMetricFamily, "num_requests_waiting_by_reason", "They, by what they wait for: a place, or to be ready",
        "reason", reasons,
    )  # fmt: skip
    for name, source, help_text in _CORE_COUNTERS:
        yield CounterMetricFamily(f"vllm:{name}", help_text, engine.stats.get(source, 0))
    by_position = enumerate(engine.stats.get("num_accepted_tokens_per_pos") or (0,))
    counts = {str(position): value for position, value in by_position}
    yield _by_label(CounterMetricFamily, ACCEPTED_BY_POSITION, "Right tokens by place in a draft", "position", counts)
    for name, help_text in _NEVER:
        yield CounterMetricFamily(f"vllm:{name}", help_text, 0)
    for name, source, help_text in _COLLECTIVE_COUNTERS:
        counts = {**dict.fromkeys(_COLLECTIVES, 0), **engine.stats.get(source, {})}
        yield _by_label(CounterMetricFamily, name, help_text, "collective", counts)


def sleep_state(level: int) -> Metric:
    """Which of upstream's three states the engine is in, by the level of its sleep; 0: it is awake."""
    states = {name: int(level == own) for own, name in enumerate(("awake", "weights_offloaded", "discard_all"))}
    return _by_label(GaugeMetricFamily, "engine_sleep_state", "1 for the state that holds", "sleep_state", states)


def _by_label(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """A family with a sample for each of the label's values."""
    family = kind(f"vllm:{name}", help_text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def cache_info(num_blocks: int, config: CacheConfig) -> Metric:
    """The cache's settings, as labels."""
    names = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
    values = {**{name: getattr(config, name) for name in names}, "num_gpu_blocks": num_blocks}
    gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache; always 1", labels=tuple(values))
    gauge.add_metric(tuple(map(str, values.values())), 1)
    return gauge


def adapter_info(config: LoRAConfig | None, stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Whose requests run and wait, as labels; the value is when, in Unix seconds. None without adapters."""
    if config is None:
        return
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    gauge = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters with requests, when seen", labels=names)
    running, waiting = (",".join(stats.get(f"{kind}_adapters", ())) for kind in ("running", "waiting"))
    gauge.add_metric((str(config.max_loras), running, waiting), time.time())
    yield gauge

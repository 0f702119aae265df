"""Traces and further metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class ObservabilityConfig(UnservedConfig):
    """Measurements beside the metrics that are always there."""

    instead: ClassVar[str] = "it is not measured; docs/metrics.md lists what /metrics and LLM.get_metrics() show"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "otlp_traces_endpoint",
            "show_hidden_metrics_for_version",
            "per_request_spec_decode_metrics",
            "kv_cache_metrics_sample",
            "jit_monitor_mode",
        }
    )

    show_hidden_metrics_for_version: str | None = None
    otlp_traces_endpoint: str | None = None
    collect_detailed_traces: list[str] | None = None
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = choice(
        "none", "none", "summary", "detailed"
    )
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = number(0.01, 0)
    custom_histogram_buckets: dict[str, list[float]] | None = None
    cudagraph_metrics: bool = False
    enable_layerwise_nvtx_tracing: bool = False
    enable_mfu_metrics: bool = False
    enable_mm_processor_stats: bool = False
    enable_logging_iteration_details: bool = False
    jit_monitor_mode: Literal["warn", "error"] = choice("warn", "warn", "error")
    jit_monitor_verbose: bool = False

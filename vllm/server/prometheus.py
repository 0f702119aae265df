"""An engine's metrics for Prometheus; docs/metrics.md explains each one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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

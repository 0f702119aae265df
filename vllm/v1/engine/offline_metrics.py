"""The metrics of an engine in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric as Family

from vllm.config import VllmConfig
from vllm.v1.metrics.core_metrics import adapter_info, add, cache_info, core_metrics, sleep_state
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.reader import Metric, snapshot


@dataclass
class _State:
    stats: Mapping[str, Any]
    num_unfinished_sequences: int
    is_dead: bool = False


class OfflineMetrics:
    """`counts` is what the output processor fills."""

    def __init__(self, config: VllmConfig) -> None:
        self.counts = EngineMetrics(config.model_config.max_model_len)
        self._config = config
        names = config.model_config.served_model_name
        self._labels = {"model_name": names[0] if names else config.model_config.model, "engine": "0"}

    def collect(self, core: Any, num_unfinished_sequences: int) -> list[Metric]:
        """The metrics of the counts and of the core, labelled with the model's name."""
        families: dict[str, Family] = {}
        add(families, [cache_info(core.executor.num_blocks, self._config.cache_config)], {"engine": "0"})
        add(families, adapter_info(self._config.lora_config, core.stats()), {"engine": "0"})
        add(families, core_metrics(_State(core.stats(), num_unfinished_sequences)), self._labels)
        add(families, [sleep_state(core.sleep_level())], self._labels)
        add(families, self.counts.registry.collect(), self._labels)
        return snapshot(families.values())

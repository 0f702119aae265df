"""Engine arguments of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.engine.arguments import arg, is_neutral, passed_on
from vllm.exceptions import shown
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)


@dataclass(kw_only=True)
class LoRAArgs:
    """What LoRAConfig is made of, and whether there is to be one."""

    enable_lora: bool = arg(False, "serve LoRA adapters, which requests name by lora_request")
    max_loras: int = arg(1, "different adapters in a step; requests of others wait", to="lora_config")
    max_lora_rank: int = arg(16, "largest rank of an adapter", to="lora_config")
    max_cpu_loras: int | None = arg(
        None, "adapters kept in the host's memory, at least max_loras, its default", to="lora_config"
    )
    lora_dtype: str | None = arg("auto", "dtype of adapters; auto: the model's", to="lora_config")
    fully_sharded_loras: bool = arg(False, "changes nothing: adapters are split as their layers are", to="lora_config")
    lora_target_modules: list[str] | None = arg(
        None, "adapters' own target_modules say where they apply", to="lora_config.target_modules"
    )
    default_mm_loras: dict[str, Any] | None = arg(None, "inputs are text only", to="lora_config")
    enable_tower_connector_lora: bool = arg(False, "inputs are text only", to="lora_config")
    specialize_active_lora: bool = arg(False, "changes nothing", to="lora_config")
    enable_mixed_moe_lora_format: bool = arg(False, "changes nothing: an adapter's files say it", to="lora_config")
    enable_moe_shared_loras: bool = arg(False, "changes nothing: an adapter's files say it", to="lora_config")
    max_lora_cls_labels: int | None = arg(None, "changes nothing: an adapter's files say it", to="lora_config")

    def create_lora_config(self) -> LoRAConfig | None:
        """None without enable_lora.

        Raises:
            ValueError: an argument that cannot be honoured; the message names it.
        """
        config = LoRAConfig(**passed_on(self, "lora_config"))
        if self.enable_lora:
            return config
        for item in fields(LoRAArgs):
            if not is_neutral(value := getattr(self, item.name), item.default):
                warn_once(logger, "%s=%s changes nothing without enable_lora", item.name, shown(value))
        return None

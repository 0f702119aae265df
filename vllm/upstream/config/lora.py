"""LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class LoRAConfig(UnservedConfig):
    """Upstream's settings of adapters: their number and ranks."""

    instead: ClassVar[str] = "LoRA adapters are not served; merge the adapter into its model and load the merged folder"
    asks_always: ClassVar[bool] = True

    max_lora_rank: int = choice(16, 1, 8, 16, 32, 64, 128, 256, 320, 512)
    max_loras: int = number(1, 1)
    fully_sharded_loras: bool = False
    max_cpu_loras: int | None = number(None, 1)
    lora_dtype: Any = "auto"
    target_modules: list[str] | None = None
    default_mm_loras: dict[str, str] | None = None
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    enable_moe_shared_loras: bool = False
    max_lora_cls_labels: int | None = number(None, 1)

"""Settings of LoRA adapters: how many, of which rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.checks import at_least, one_of
from vllm.exceptions import shown

LORA_DTYPES = ("auto", "float32", "float16", "bfloat16")

# Fields of upstream's that have one value here, and why.
_ONE_VALUE = {
    "target_modules": "an adapter's own target_modules say where it applies",
    "default_mm_loras": "inputs are text only; leave media out",
    "enable_tower_connector_lora": "inputs are text only; leave media out",
}


@dataclass(frozen=True)
class LoRAConfig:
    """How many adapters there may be at once, and how large.

    Attributes:
        max_lora_rank: the largest rank of an adapter.
        max_loras: different adapters among the requests of a step.
        fully_sharded_loras: changes nothing: an adapter's matrices are split as their base layer is.
        max_cpu_loras: adapters kept in the host's memory, the least recently used going first; None = max_loras.
        lora_dtype: of the adapters' matrices; "auto" is the model's.
        target_modules, default_mm_loras, enable_tower_connector_lora: neutral.
        specialize_active_lora, enable_mixed_moe_lora_format, enable_moe_shared_loras, max_lora_cls_labels: change
            nothing: an adapter's files say what it holds.

    Raises:
        ValueError: a value out of its limits, or one that asks for what is not done; names the field.
    """

    max_lora_rank: int = 16
    max_loras: int = 1
    fully_sharded_loras: bool = False
    max_cpu_loras: int | None = None
    lora_dtype: Any = "auto"
    target_modules: list[str] | None = None
    default_mm_loras: dict[str, str] | None = None
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    enable_moe_shared_loras: bool = False
    max_lora_cls_labels: int | None = None

    def __post_init__(self) -> None:
        at_least("max_lora_rank", self.max_lora_rank, 1)
        at_least("max_loras", self.max_loras, 1)
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        at_least("max_cpu_loras", self.max_cpu_loras, 1)
        if self.num_kept < self.max_loras:
            raise ValueError(
                f"max_cpu_loras must be at least max_loras={self.max_loras}, those of a step, got {self.max_cpu_loras}"
            )
        object.__setattr__(self, "lora_dtype", str(self.lora_dtype or "auto").removeprefix("torch."))
        one_of("lora_dtype", self.lora_dtype, LORA_DTYPES)
        for name, why in _ONE_VALUE.items():
            if value := getattr(self, name):
                raise ValueError(f"{name}={shown(value)} is not supported: {why}")

    @property
    def num_kept(self) -> int:
        """`max_cpu_loras`, which is never None once the configuration is made."""
        assert self.max_cpu_loras is not None
        return self.max_cpu_loras

    def check_dtype(self, dtype: str) -> None:
        """
        Raises:
            ValueError: `lora_dtype` is another than the model's `dtype`.
        """
        if self.lora_dtype not in ("auto", dtype):
            raise ValueError(f"lora_dtype must be auto or the model's dtype, {dtype}, got {self.lora_dtype!r}")

"""AutoRound's checkpoints, whose tensors are GPTQ's or AWQ's: their settings in those formats' terms."""

from __future__ import annotations

import re
from typing import Any

from vllm.model_executor.layers.quantization.awq import AWQConfig
from vllm.model_executor.layers.quantization.gptq import GPTQConfig
from vllm.model_executor.layers.quantization.setting_values import read_objects
from vllm.model_executor.layers.quantization.stored import StoredConfig, WeightFormat

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16


class AutoRoundConfig(StoredConfig):
    """See the module."""

    names = tuple(dict.fromkeys((*GPTQConfig.names, *AWQConfig.names)))

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        packing = config.get("packing_format") or _GPTQ
        if packing not in (_GPTQ, _AWQ):
            raise ValueError(f"packing_format must be {_GPTQ} or {_AWQ}, got {packing!r}")
        if config.get("data_type", "int") != "int" or (config.get("act_bits") or _PLAIN_BITS) < _PLAIN_BITS:
            raise ValueError("data_type must be int, and act_bits 16: activations are not rounded")
        own = read_objects(config, "extra_config")
        dynamic = {}
        for name, changes in own.items():
            is_plain = changes.get("bits", 0) >= _PLAIN_BITS
            dynamic[("-:" if is_plain else "+:") + _pattern(name)] = {
                key: changes[key] for key in ("bits", "group_size", "sym") if key in changes
            }
        settings = {**config, "checkpoint_format": "gptq", "dynamic": dynamic}
        if packing == _AWQ and any(
            changes.get("bits", 4) not in (4, _PLAIN_BITS) or "group_size" in changes for changes in own.values()
        ):
            raise ValueError("extra_config cannot change bits or group_size of single modules in AWQ's layout")
        self._format: StoredConfig = AWQConfig(settings) if packing == _AWQ else GPTQConfig(settings)

    def get_name(self) -> str:
        return "auto-round"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoRoundConfig:
        return cls(config)

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        return self._format.weight_format(module, stored)


def _pattern(name: str) -> str:
    """An expression for a module's name, or for names with some characters that only expressions have."""
    return f"(?:{name})$" if re.search(r"[*+?\[\]()|\\^$]", name) else f"{re.escape(name)}$"

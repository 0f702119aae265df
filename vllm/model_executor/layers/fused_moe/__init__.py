"""Layers of experts: names that callers ask isinstance of."""

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.layer import FusedMoE

__all__ = ["FusedMoE", "FusedMoEConfig", "FusedMoEMethodBase", "FusedMoEQuantConfig"]

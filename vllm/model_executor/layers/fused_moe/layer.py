"""A layer of experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.refusal import NO_EXPERTS
from vllm.utils.unserved import Unserved


class FusedMoE(Unserved, nn.Module):
    """Upstream's layer of experts: no module of a model here is one."""

    instead: ClassVar[str] = NO_EXPERTS


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Of a FusedMoE."""

"""How experts are quantised."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.layers.fused_moe.refusal import NO_EXPERTS
from vllm.utils.unserved import Unserved


class FusedMoEQuantConfig(Unserved):
    """Of a FusedMoE."""

    instead: ClassVar[str] = NO_EXPERTS


class FusedMoEConfig(Unserved):
    """Of a FusedMoE."""

    instead: ClassVar[str] = NO_EXPERTS

"""How experts are computed."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.layers.fused_moe.refusal import NO_EXPERTS
from vllm.utils.unserved import Unserved


class FusedMoEMethodBase(Unserved):
    """Of a FusedMoE."""

    instead: ClassVar[str] = NO_EXPERTS

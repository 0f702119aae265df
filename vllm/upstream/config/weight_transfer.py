"""Weights from a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.config.unserved import UnservedConfig


@dataclass
class WeightTransferConfig(UnservedConfig):
    """By what a trainer in another process sends new weights."""

    instead: ClassVar[str] = (
        "weights are not received from another process; load them where the engine is, by collective_rpc or by "
        "load_weights of the model"
    )
    asks_always: ClassVar[bool] = True

    backend: str = "nccl"

"""Weights from a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.engine.weight_transfer import check_weight_transfer_config


@dataclass
class WeightTransferConfig:
    """By what a trainer in another process sends new weights: "nccl" goes over gloo, "ipc" by files in the memory that
    a machine's processes share. Engines take either, whatever this says."""

    backend: str = "nccl"

    def __post_init__(self) -> None:
        check_weight_transfer_config(self)

"""Weights between two shardings over NCCL: what a trainer is told. The transport is not built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo


@dataclass
class M2NTrainerInitInfo(TrainerInitInfo):
    """Where trainer and engines meet, `world_size` processes in all, the trainer's first."""

    backend: ClassVar[str] = "nccl_m2n"

    master_address: str
    master_port: int
    world_size: int
    num_trainer_ranks: int

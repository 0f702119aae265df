"""Weights that workers fetch by Ray, each its part: what a trainer is told. The transport is not built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo


@dataclass
class ShardedRDTTrainerInitInfo(TrainerInitInfo):
    """How many workers fetch, where they find the trainer's actors, and how much is kept ready for them."""

    backend: ClassVar[str] = "sharded_rdt"

    num_consumers: int
    trainer_actor_namespace: str | None = None
    num_rdt_buffers: int = 2
    buffer_presize_gb: float = 0.0
    gather_lookahead: int = 1
    stall_timeout_s: float = 300.0

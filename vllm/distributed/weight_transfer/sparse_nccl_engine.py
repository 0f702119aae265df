"""Changes of single values over NCCL: what a trainer is told. The transport is not built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SparseNCCLTrainerInitInfo(TrainerInitInfo):
    """Where trainer and engines meet, `world_size` processes in all."""

    backend: ClassVar[str] = "sparse_nccl"

    master_address: str
    master_port: int
    world_size: int


@dataclass
class SparseWeightPatch:
    """New `values` of a parameter at flat `indices`, int32, as many."""

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...] | None = None

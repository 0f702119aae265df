"""Weights in the memory of a GPU that both share: what a trainer is told. The transport is not built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """Whether tensors are sent many at a time."""

    backend: ClassVar[str] = "ipc"

    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES

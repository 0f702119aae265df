"""Transports of weights from a trainer in another process: what a trainer is told. None is built in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from vllm.upstream.weights.transfer import TrainerInitInfo

if TYPE_CHECKING:
    from torch import Tensor


def refuse_transfer(name: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: says what to do instead.
    """
    raise NotImplementedError(
        f"{name}: engines do not receive weights from another process over NCCL; train with the engine in the "
        "trainer's own process, or save the weights over the model's and call collective_rpc('reload_weights')"
    )


DEFAULT_PACKED_BUFFER_SIZE_BYTES = 1 << 30


DEFAULT_PACKED_NUM_BUFFERS = 2


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS,
) -> NoReturn:
    """Send the iterator's tensors to the others of `group`.

    Raises:
        NotImplementedError: always.
    """
    refuse_transfer("packed_nccl_broadcast_producer")


def packed_nccl_broadcast_consumer(
    iterator: Iterator[tuple[str, Any]],
    group: Any,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, Tensor]]], None],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS,
) -> NoReturn:
    """Receive what the producer sends.

    Raises:
        NotImplementedError: always.
    """
    refuse_transfer("packed_nccl_broadcast_consumer")


def trainer_init(init_info: Any, rank: int = 0) -> NoReturn:
    """Join the group of `init_info` (master_address, master_port, world_size) as the trainer.

    Raises:
        NotImplementedError: always.
    """
    refuse_transfer("trainer_init")


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """Whether tensors are sent many at a time."""

    backend: ClassVar[str] = "ipc"

    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    """Where trainer and engines meet, `world_size` processes in all, and whether tensors are sent many at a time."""

    backend: ClassVar[str] = "nccl"

    master_address: str
    master_port: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


@dataclass
class M2NTrainerInitInfo(TrainerInitInfo):
    """Where trainer and engines meet, `world_size` processes in all, the trainer's first."""

    backend: ClassVar[str] = "nccl_m2n"

    master_address: str
    master_port: int
    world_size: int
    num_trainer_ranks: int


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

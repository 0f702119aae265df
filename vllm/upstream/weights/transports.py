"""How a trainer sends weights to engines in other processes: over gloo, by the names of upstream's transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from vllm.distributed.trainer_group import BUCKET_BYTES, TrainerGroup, receive_tensors, send_tensors
from vllm.upstream.distributed.pynccl import PyNcclCommunicator
from vllm.upstream.distributed.stateless_group import StatelessProcessGroup
from vllm.upstream.weights.transfer import TrainerInitInfo, WeightTransferEngine

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def refuse_transfer(name: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: says what to do instead.
    """
    raise NotImplementedError(
        f"{name}: weights are sent by NCCLTrainerInitInfo (over gloo) or IPCTrainerInitInfo (a file in memory that the "
        "machine's processes share); see docs/training.md"
    )


DEFAULT_PACKED_BUFFER_SIZE_BYTES = BUCKET_BYTES


DEFAULT_PACKED_NUM_BUFFERS = 2


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: TrainerGroup,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS,
) -> None:
    """Send what `post_iter_func` makes of the iterator's entries to the other members of `group`, over gloo; returns
    when all of it was sent.

    Args:
        buffer_size_bytes: how many are sent at a time.
        num_buffers: has no effect: there is one.
    """
    send_tensors(group, (post_iter_func(item) for item in iterator), src, buffer_size_bytes)


def packed_nccl_broadcast_consumer(
    iterator: Iterator[tuple[str, tuple[Sequence[int], torch.dtype]]],
    group: PyNcclCommunicator,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, Tensor]]], Any],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS,
) -> None:
    """Receive what member `src` sends by packed_nccl_broadcast_producer.

    Args:
        iterator: name, shape and dtype of each tensor.
        post_unpack_func: is called with each tensor and its name, in a list.
        buffer_size_bytes, num_buffers: have no effect: the sender's count.

    Raises:
        ValueError: other tensors come.
        RuntimeError: the sender failed.
    """
    announced = [(name, (tuple(shape), dtype)) for name, (shape, dtype) in iterator]
    tensors = receive_tensors(group, [form for _, form in announced], src)
    for (name, _), tensor in zip(announced, tensors, strict=True):
        post_unpack_func([(name, tensor.to(group.device))])


def trainer_init(init_info: Any, rank: int = 0) -> PyNcclCommunicator:
    """Meet the engines' workers as the trainer: `init_info` has master_address, this machine's, master_port and
    world_size, of trainer and workers. Returns when all have come."""
    of = init_info.__getitem__ if isinstance(init_info, Mapping) else partial(getattr, init_info)
    place = of("master_address"), of("master_port")
    return PyNcclCommunicator(StatelessProcessGroup.create(*place, rank, of("world_size")))


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How NCCLWeightTransferEngine.trainer_send_weights sends: to whom, from which member, and what of each entry; the
    tensor, if nothing is said. The rest has no effect: many tensors are sent at a time, on no stream."""

    group: TrainerGroup
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


class NCCLWeightTransferEngine(WeightTransferEngine[Any, Any]):
    """The older form of a trainer's calls. Engines make none of it."""

    @staticmethod
    def trainer_init(init_info: Any) -> PyNcclCommunicator:
        """As `trainer_init`."""
        return trainer_init(init_info)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Tensor]], trainer_args: NCCLTrainerSendWeightsArgs | dict[str, Any]
    ) -> None:
        """Send the iterator's tensors, as packed_nccl_broadcast_producer does."""
        args = NCCLTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, dict) else trainer_args
        chosen = args.post_iter_func or itemgetter(1)
        packed_nccl_broadcast_producer(iterator, args.group, args.src, chosen, args.packed_buffer_size_bytes)


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

"""Weights sent many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.distributed.weight_transfer.refusal import refuse_transfer

if TYPE_CHECKING:
    from torch import Tensor

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

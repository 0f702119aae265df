"""Tensors between processes that are no ranks of one engine: a trainer's weights, sent to the workers of engines."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.process_group import connect_hosts

BUCKET_BYTES = 1 << 30
MEETING = "further"
"""Where in their store members meet for a group, and which number of theirs it is."""
# A sender may gather, between two buckets, what its own ranks hold.
_TIMEOUT = timedelta(minutes=30)
# Each tensor in a bucket begins at such a multiple, so that it can be viewed in place.
_ALIGNMENT = 16
_END, _FAILED = 0, -1


class TrainerGroup:
    """Members that exchange tensors over gloo, on any machines, those of other devices through the host's memory. Every
    one makes the same calls in the same order, with tensors of the same sizes.

    Attributes:
        rank, world_size: this member, and how many there are.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, peer: str) -> None:
        """Meet the other members in `store`, which is at `peer`; returns when all have come."""
        # The store ends with its last reference at rank 0, and with it what the others wait for.
        self._store, self.rank, self.world_size = store, rank, world_size
        self._hosts = connect_hosts(store, rank, world_size, _own_address(peer), _TIMEOUT)
        self._gloo: Any = self._hosts.device_group

    def close(self) -> None:
        """Leave: what the others wait for is an error there."""
        self._hosts.disconnect()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Rank `src`'s tensor, into the others' `tensor`. `stream` has no effect: it is done when this returns."""
        host = on_host(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._gloo.broadcast([host], options).wait()
        if self.rank != src:
            put(tensor, host)


def meeting_store(address: str, port: int, rank: int, size: int, seconds: int = 300, **options: Any) -> dist.Store:
    """The store of all members, which rank 0 keeps at its address; returns when all have come."""
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, use_libuv=False, **options)


def join_trainer(address: str, port: int, rank: int, world_size: int) -> TrainerGroup:
    """Meet the trainer and the workers of its engines at the trainer's address; rank 0 is the trainer's."""
    store = dist.PrefixStore(f"{MEETING}/0", meeting_store(address, port, rank, world_size))
    return TrainerGroup(store, rank, world_size, address)


def send_tensors(
    group: TrainerGroup, tensors: Iterable[Tensor], src: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Send all tensors to the other members, which call `receive_tensors`, in buckets of about `bucket_bytes`.

    An error of `tensors` is one there, too.
    """
    bucket, filled = torch.empty(0, dtype=torch.uint8), 0
    sizes: list[int] = []
    for tensor in _telling_failure(group, tensors, src):
        size = tensor.numel() * tensor.element_size()
        if sizes and filled + _padded(size) > len(bucket):
            _send_bucket(group, bucket[:filled], sizes, src)
            sizes, filled = [], 0
        if filled + _padded(size) > len(bucket):
            bucket = torch.empty(max(_padded(size), bucket_bytes), dtype=torch.uint8)
        # At once: the caller may use its memory again, as one does that merges adapters and takes them out.
        bucket[filled : filled + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        sizes.append(size)
        filled += _padded(size)
    if sizes:
        _send_bucket(group, bucket[:filled], sizes, src)
    group.broadcast(torch.tensor([_END]), src)


def receive_tensors(
    group: TrainerGroup, forms: Sequence[tuple[tuple[int, ...], torch.dtype]], src: int = 0
) -> Iterator[Tensor]:
    """The tensors that member `src` sends, on the host: of the shapes and dtypes of `forms`, in order. After an error
    the group is closed.

    Raises:
        ValueError: others come, or more or fewer.
        RuntimeError: the sender failed, or has gone.
    """
    try:
        expected = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in forms]
        index = 0
        while (count := _next_count(group, src)) > 0:
            sizes = torch.zeros(count, dtype=torch.int64)
            group.broadcast(sizes, src)
            if sizes.tolist() != expected[index : index + count]:
                raise ValueError(f"tensors {index} to {index + count - 1} that came are not of the announced sizes")
            bucket = torch.empty(int(sum(map(_padded, sizes.tolist()))), dtype=torch.uint8)
            group.broadcast(bucket, src)
            start = 0
            for (shape, dtype), num_bytes in zip(forms[index : index + count], sizes.tolist(), strict=True):
                yield bucket[start : start + num_bytes].view(dtype).view(shape)
                start += _padded(num_bytes)
            index += count
        if count == _FAILED:
            raise RuntimeError("the sender of the weights failed")
        if index < len(forms):
            raise ValueError(f"{index} tensors came, of {len(forms)} that were announced")
    except BaseException:
        group.close()
        raise


def _telling_failure(group: TrainerGroup, tensors: Iterable[Tensor], src: int) -> Iterator[Tensor]:
    try:
        yield from tensors
    except Exception:
        group.broadcast(torch.tensor([_FAILED]), src)
        raise


def _send_bucket(group: TrainerGroup, bucket: Tensor, sizes: list[int], src: int) -> None:
    for part in (torch.tensor([len(sizes)]), torch.tensor(sizes), bucket):
        group.broadcast(part, src)


def _next_count(group: TrainerGroup, src: int) -> int:
    count = torch.zeros(1, dtype=torch.int64)
    group.broadcast(count, src)
    return int(count)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def on_host(tensor: Tensor) -> Tensor:
    """Contiguous bytes or values that gloo takes: float8 and their like it does not know."""
    host = tensor.detach().to("cpu").contiguous()
    return host.view(torch.uint8) if host.dtype.itemsize == 1 else host


def put(tensor: Tensor, host: Tensor) -> None:
    """Copy what `on_host` gave into `tensor`, unless that is its memory."""
    if host.data_ptr() != tensor.data_ptr():
        tensor.copy_(host.view(tensor.dtype))


def _own_address(peer: str) -> str:
    """This machine's address on the way to `peer`. Nothing is sent: a datagram socket only chooses the interface."""
    for family, kind, _, _, place in socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return "127.0.0.1"

"""Collectives over torch.distributed, with a count of what they move."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor


class Communicator:
    """The ranks that share one model. Every rank makes the same calls in the same order.

    A group of one rank moves nothing and needs no torch.distributed: `Communicator()`.

    Attributes:
        rank: this process, in [0, world_size).
        world_size: N, the number of ranks.
        num_bytes: by collective ("all_reduce", "all_gather", "gather", "broadcast"), the bytes that this rank has
            handed over, payload only: what the tensors it put in hold.
        num_calls: by collective, how often it ran.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            group: an initialised process group of which this process is a member; None = this process alone.
        """
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.num_bytes: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place where `tensor` is contiguous; returns the sum."""
        if self.world_size == 1:
            return tensor
        self._count("all_reduce", tensor)
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Each rank's tensor of one shape and dtype, as [N, *shape] in the order of ranks, on every rank."""
        if self.world_size == 1:
            return tensor[None]
        self._count("all_gather", tensor)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=self._group)
        return gathered

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor | None:
        """As all_gather, on rank `dst` alone; None elsewhere."""
        if self.world_size == 1:
            return tensor[None]
        self._count("gather", tensor)
        gathered = tensor.new_empty((self.world_size, *tensor.shape)) if self.rank == dst else None
        parts = None if gathered is None else list(gathered.unbind(0))
        dist.gather(tensor.contiguous(), parts, group=self._group, group_dst=dst)
        return gathered

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Rank `src`'s tensor, into a contiguous `tensor` of the same shape and dtype on the others."""
        if self.world_size == 1:
            return tensor
        self._count("broadcast", tensor)
        dist.broadcast(tensor, group=self._group, group_src=src)
        return tensor

    def _count(self, collective: str, tensor: Tensor) -> None:
        self.num_bytes[collective] += tensor.numel() * tensor.element_size()
        self.num_calls[collective] += 1


def split_vocab(vocab_size: int, world_size: int) -> list[range]:
    """The token ids of each rank: N contiguous ranges that cover [0, vocab_size), sizes differing by 1 at most."""
    bounds = [vocab_size * rank // world_size for rank in range(world_size + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


ALONE = Communicator()
"""A group of one rank."""

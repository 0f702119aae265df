"""Upstream's communicator of a StatelessProcessGroup, over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.trainer_group import TrainerGroup, on_host, put
from vllm.upstream.distributed.stateless_group import StatelessProcessGroup


class PyNcclCommunicator(TrainerGroup):
    """
    Attributes:
        group: the members.
        device: of results for which no tensor is given.
        available, disabled: it works.
    """

    available, disabled = True, False

    def __init__(
        self, group: StatelessProcessGroup, device: int | str | torch.device = "cpu", library_path: str | None = None
    ) -> None:
        """Meet the other members; returns when all have come.

        Args:
            device: an int is a CUDA device's index.
            library_path: has no effect: NCCL is not used.

        Raises:
            TypeError: `group` is another kind of group.
        """
        if not isinstance(group, StatelessProcessGroup):
            raise TypeError(f"group must be a StatelessProcessGroup, got {type(group).__name__}")
        self.group = group
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        host = getattr(group.store, "host", "127.0.0.1")
        super().__init__(group.further_store(), group.rank, group.world_size, host)

    def all_reduce(
        self, in_tensor: Tensor, out_tensor: Tensor | None = None, op: Any = dist.ReduceOp.SUM, stream: Any = None
    ) -> Tensor:
        """The members' tensors, added up or by another `op`; into `out_tensor`, if it is given."""
        host = on_host(in_tensor).clone()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._gloo.allreduce([host], options).wait()
        out = torch.empty_like(in_tensor) if out_tensor is None else out_tensor
        return out.copy_(host.view_as(out))

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, stream: Any = None) -> None:
        """Every member's `input_tensor`, one behind the other, into `output_tensor`."""
        host = on_host(input_tensor)
        parts = [torch.empty_like(host) for _ in range(self.world_size)]
        self._gloo.allgather([parts], [host]).wait()
        output_tensor.copy_(torch.stack(parts).view_as(output_tensor))

    def send(self, tensor: Tensor, dst: int, stream: Any = None) -> None:
        """Hand a tensor to rank `dst`."""
        self._gloo.send([on_host(tensor)], dst, 0).wait()

    def recv(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Rank `src`'s next tensor, into `tensor`."""
        host = on_host(tensor)
        self._gloo.recv([host], src, 0).wait()
        put(tensor, host)

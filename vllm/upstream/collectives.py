"""Collectives over the tensor-parallel group, under upstream's names."""

from __future__ import annotations

from typing import Any

import torch

from vllm.distributed.parallel_state import get_tp_group
from vllm.upstream.utils.unserved import refuse


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The ranks' tensors joined along `dim`, on every rank."""
    return torch.cat(list(get_tp_group().all_gather(input_)), dim)


def tensor_model_parallel_gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
    """The same on rank `dst` alone; None elsewhere."""
    gathered = get_tp_group().gather(input_, dst)
    return None if gathered is None else torch.cat(list(gathered), dim)


def tensor_model_parallel_reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum over the ranks."""
    group = get_tp_group()
    return group.all_reduce(input_).chunk(group.world_size, dim)[group.rank]


def broadcast_tensor_dict(tensor_dict: dict[str, Any] | None = None, src: int = 0) -> dict[str, Any] | None:
    """The dict of rank `src`, on every rank; a group of one has it.

    Raises:
        NotImplementedError: there are several ranks.
    """
    if get_tp_group().world_size > 1:
        refuse("broadcast_tensor_dict", "ranks get each step from the engine; torch.distributed broadcasts objects")
    return tensor_dict

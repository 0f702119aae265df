"""Collectives over the tensor-parallel group, under upstream's names."""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import get_tp_group


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

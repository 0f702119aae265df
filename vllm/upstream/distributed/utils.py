"""Parts of a whole, by upstream's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vllm.upstream.distributed.stateless_group import StatelessProcessGroup
from vllm.upstream.utils.unserved import refuse

__all__ = [
    "StatelessProcessGroup",
    "create_tcp_store",
    "divide",
    "ensure_divisibility",
    "get_pp_indices",
    "split_tensor_along_last_dim",
    "stateless_init_torch_distributed_process_group",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """
    Raises:
        AssertionError: there is a remainder.
    """
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """The quotient.

    Raises:
        AssertionError: there is a remainder.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Equal parts of the last dimension: views, or copies with `contiguous_split_chunks`."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def create_tcp_store(host: str, port: int, **kwargs: Any) -> dist.TCPStore:
    """torch's store, with torch's arguments."""
    return dist.TCPStore(host, port, **kwargs)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The first of a rank's layers, and the one after its last: equal parts, what is left over to the ranks before the
    last one, from behind."""
    each, left = divmod(num_hidden_layers, pp_size)
    counts = [each] * pp_size
    for index in range(left):
        counts[-index - 2] += 1
    start = sum(counts[:pp_rank])
    return start, start + counts[pp_rank]


def stateless_init_torch_distributed_process_group(*args: Any, **kwargs: Any) -> NoReturn:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse(
        "stateless_init_torch_distributed_process_group",
        "StatelessProcessGroup hands values over without torch.distributed's global state",
    )

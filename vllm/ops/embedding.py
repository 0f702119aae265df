"""Rows of a table by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """[T, H]: the rows of `weight` [V, H], contiguous, that `token_ids` name: int32 or int64 [T], each in [0, V),
    contiguous."""
    if implementation(weight) == "cpp":
        return torch.ops.vllm_cpu.embedding(weight, token_ids)
    return F.embedding(token_ids, weight)

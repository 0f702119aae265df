"""The k greatest logits of each row, sorted, with ties in the order of their ids."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values float32 [R, k] and ids int32 [R, k] of each row's k greatest logits, descending; the lower id first among
    equals. `logits` are [R, V], float32, bfloat16 or float16, without NaN, with any strides. ValueError for a wrong
    shape or dtype, or a k that is not in [0, V]."""
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits must be [R, V] in float32, bfloat16 or float16, got {logits.dtype} {tuple(logits.shape)}"
        )
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [0, {logits.shape[1]}], got {k}")
    which = implementation(logits)
    if which != "reference" and (logits.shape[1] <= 1 or logits.stride(1) == 1):
        return (torch.ops.vllm_cpu.topk if which == "cpp" else triton_function("topk", __name__))(logits, k)
    # A stable sort, because torch.topk promises no order among equals.
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), ids[:, :k].to(torch.int32)

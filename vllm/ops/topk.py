"""The k greatest logits of each row, sorted, with ties in the order of their ids."""

from __future__ import annotations

import torch

from vllm.ops._dispatch import implementation


def topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest logits of each row, by descending value; among equals the lower id comes first.

    Args:
        logits: [R, V], float32, bfloat16 or float16, without NaN; the last dimension contiguous, any stride
            between rows.
        k: in [0, V].

    Returns:
        values float32 [R, k], ids int32 [R, k].

    Raises:
        ValueError: a shape or dtype is wrong, or k is not in [0, V].
    """
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits must be [R, V] in float32, bfloat16 or float16, got {logits.dtype} {tuple(logits.shape)}"
        )
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [0, {logits.shape[1]}], got {k}")
    which = implementation(logits)
    if which != "reference" and (logits.shape[1] <= 1 or logits.stride(1) == 1):
        if which == "cpp":
            values, ids = torch.ops.vllm_cpu.topk(logits, k)
            return values, ids
        from vllm.ops.triton import topk as kernels

        return kernels.topk(logits, k)
    return _reference(logits, k)


def _reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort, because torch.topk promises no order among equals.
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), ids[:, :k].to(torch.int32)

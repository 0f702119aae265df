"""How many of a row's logits exceed given values: ranks of tokens that stand in another slice of the vocabulary."""

from __future__ import annotations

import torch

from vllm.ops._dispatch import implementation

# Above this many values one sort of the row is cheaper than a comparison of the row with each of them.
_SORT_ABOVE = 64


def count_above(logits: torch.Tensor, values: torch.Tensor, num_values: torch.Tensor | None = None) -> torch.Tensor:
    """Count the strictly greater logits of each row.

    Args:
        logits: [R, V], float32, bfloat16 or float16; the last dimension contiguous, any stride between rows. What is
            counted in a row with NaN is meaningless.
        values: float32 [R, W]; the last dimension contiguous, any stride between rows.
        num_values: int32 [R], how many leading columns of each row count; the others are padding. None: all W.

    Returns:
        int32 [R, W]; 0 in padding columns.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    _check(logits, values, num_values)
    which = implementation(logits)
    if which == "cpp":
        return torch.ops.vllm_cpu.count_above(logits, values, num_values)
    if which == "triton":
        from vllm.ops.triton import count_above as kernels

        return kernels.count_above(logits, values, num_values)
    counts = count_above_reference(logits.float(), values)
    if num_values is not None:
        column = torch.arange(values.shape[1], device=values.device)
        counts.masked_fill_(column >= num_values[:, None], 0)
    return counts


def _check(logits: torch.Tensor, values: torch.Tensor, num_values: torch.Tensor | None) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or (logits.stride(1) not in (0, 1) and logits.shape[1] > 1):
        raise ValueError(
            "logits must be [R, V] with V > 0 and its last dimension contiguous, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    if values.dim() != 2 or len(values) != len(logits) or values.dtype != torch.float32:
        raise ValueError(f"values must be float32 [{len(logits)}, W], got {values.dtype} {tuple(values.shape)}")
    if num_values is not None and (num_values.shape != logits.shape[:1] or num_values.dtype != torch.int32):
        raise ValueError(f"num_values must be int32 [{len(logits)}], got {num_values.dtype} {tuple(num_values.shape)}")


def count_above_reference(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int32 [R, W]: how many of a row's float32 logits [R, V] are greater than each of its values."""
    if values.shape[1] > _SORT_ABOVE:
        ascending = logits.sort(dim=-1).values
        not_greater = torch.searchsorted(ascending, values.contiguous(), right=True)
        return (logits.shape[1] - not_greater).to(torch.int32)
    counts = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    for column in range(values.shape[1]):
        counts[:, column] = (logits > values[:, column, None]).sum(dim=-1)
    return counts

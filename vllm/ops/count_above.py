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
    check_columns(logits, "values", values, torch.float32, num_values)
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


def check_columns(
    logits: torch.Tensor,
    name: str,
    columns: torch.Tensor,
    dtype: torch.dtype,
    num_columns: torch.Tensor | None,
) -> None:
    """Check rows of logits, a table with as many rows, and how many of its leading columns count.

    Args:
        name: of the table, which has `dtype`; the counts' name is this with "num_" before it.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or (logits.stride(1) not in (0, 1) and logits.shape[1] > 1):
        raise ValueError(
            "logits must be [R, V] with V > 0 and its last dimension contiguous, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    if columns.dim() != 2 or len(columns) != len(logits) or columns.dtype != dtype:
        wanted = f"{str(dtype).removeprefix('torch.')} [{len(logits)}, W]"
        raise ValueError(f"{name} must be {wanted}, got {columns.dtype} {tuple(columns.shape)}")
    if num_columns is not None and (num_columns.shape != logits.shape[:1] or num_columns.dtype != torch.int32):
        raise ValueError(
            f"num_{name} must be int32 [{len(logits)}], got {num_columns.dtype} {tuple(num_columns.shape)}"
        )


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

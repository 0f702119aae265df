"""How many of a row's logits exceed given values: ranks of tokens in another slice of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function

# Above this many values one sort of the row is cheaper than a comparison of the row with each of them.
_SORT_ABOVE = 64
_TRITON_SORT_ABOVE = 256


def count_above(logits: Tensor, values: Tensor, num_values: Tensor | None = None) -> Tensor:
    """Count the strictly greater logits of each row: int32 [R, W], 0 in padding columns. ValueError for a wrong shape
    or dtype.

    `logits` [R, V], float32, bfloat16 or float16, and `values`, float32 [R, W], have a contiguous last dimension and
    any stride between rows. Counts of a row with NaN are meaningless. `num_values`, int32 [R]: how many leading columns
    of each row count; the others are padding. None: all W.
    """
    check_columns(logits, "values", values, torch.float32, num_values)
    which = implementation(logits)
    if which == "cpp":
        return torch.ops.vllm_cpu.count_above(logits, values, num_values)
    if which == "triton" and values.shape[1] <= _TRITON_SORT_ABOVE:
        return triton_function("count_above", __name__)(logits, values, num_values)
    counts = count_above_reference(logits.float(), values)
    if num_values is not None:
        column = torch.arange(values.shape[1], device=values.device)
        counts.masked_fill_(column >= num_values[:, None], 0)
    return counts


def check_columns(logits: Tensor, name: str, columns: Tensor, dtype: torch.dtype, num_columns: Tensor | None) -> None:
    """ValueError if rows of logits, or the table `name` that belongs to them (see `check_table`), have a wrong shape or
    dtype."""
    if logits.dim() != 2 or logits.shape[1] == 0 or (logits.stride(1) not in (0, 1) and logits.shape[1] > 1):
        raise ValueError(
            "logits must be [R, V] with V > 0 and its last dimension contiguous, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    check_table(len(logits), name, columns, dtype, num_columns)


def check_table(num_rows: int, name: str, columns: Tensor, dtype: torch.dtype, num_columns: Tensor | None) -> None:
    """ValueError unless the table `name` is [num_rows, W] of `dtype`, and "num_" + `name` int32 [num_rows] or None."""
    if columns.dim() != 2 or len(columns) != num_rows or columns.dtype != dtype:
        wanted = f"{str(dtype).removeprefix('torch.')} [{num_rows}, W]"
        raise ValueError(f"{name} must be {wanted}, got {columns.dtype} {tuple(columns.shape)}")
    if num_columns is not None and (num_columns.shape != (num_rows,) or num_columns.dtype != torch.int32):
        raise ValueError(f"num_{name} must be int32 [{num_rows}], got {num_columns.dtype} {tuple(num_columns.shape)}")


def count_above_reference(logits: Tensor, values: Tensor) -> Tensor:
    """int32 [R, W]: how many of a row's logits [R, V] are greater than each of its values, both of one dtype."""
    if values.shape[1] > _SORT_ABOVE:
        ascending = logits.sort(dim=-1).values
        not_greater = torch.searchsorted(ascending, values.contiguous(), right=True)
        return (logits.shape[1] - not_greater).to(torch.int32)
    counts = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    for column in range(values.shape[1]):
        counts[:, column] = (logits > values[:, column, None]).sum(dim=-1)
    return counts

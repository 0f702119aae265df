"""Triton implementation of `count_above`: the logits are read from memory once.

A program holds one chunk of a row in registers and compares it with the row's values. The chunks' counts are added by
atomics: of integers, so in whatever order they come the sum is the same.

The kernel masks: the last chunk's tail counts as -inf, which exceeds nothing, and padding columns stay 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
# Values compared at once: their counts share the barriers of one reduction.
_GROUP = 8
# Above this many columns one sort of the row is cheaper than a comparison of the row with each column.
_SORT_ABOVE = 256


def count_above(logits: torch.Tensor, values: torch.Tensor, num_values: torch.Tensor | None) -> torch.Tensor:
    """Run the kernel. Arguments and result: `vllm.ops.count_above.count_above`."""
    num_rows, num_columns = values.shape
    if num_columns > _SORT_ABOVE:
        return _count_by_sort(logits, values, num_values)
    counts = torch.zeros((num_rows, num_columns), dtype=torch.int32, device=logits.device)
    if not counts.numel():
        return counts
    vocab_size = logits.shape[1]
    has_counts = num_values is not None
    _count_above_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        logits.stride(0),
        vocab_size,
        values,
        values.stride(0),
        num_columns,
        num_values if has_counts else counts,
        counts,
        HAS_COUNTS=has_counts,
        BLOCK=_BLOCK,
        GROUP=_GROUP,
    )
    return counts


def _count_by_sort(logits: torch.Tensor, values: torch.Tensor, num_values: torch.Tensor | None) -> torch.Tensor:
    ascending = logits.float().sort(dim=-1).values
    not_greater = torch.searchsorted(ascending, values.contiguous(), right=True)
    counts = (logits.shape[1] - not_greater).to(torch.int32)
    if num_values is not None:
        counts.masked_fill_(torch.arange(values.shape[1], device=values.device) >= num_values[:, None], 0)
    return counts


@triton.jit
def _count_above_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    vocab_size,
    values_ptr,  # float32 [R, W]
    values_stride,
    num_columns,
    num_values_ptr,  # int32 [R], looked at if HAS_COUNTS
    counts_ptr,  # int32 [R, W], zeros
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    highest = tl.max(x, axis=0)
    num_valid = num_columns
    if HAS_COUNTS:
        num_valid = tl.load(num_values_ptr + row)
    for first in range(0, num_valid, GROUP):
        wanted = first + tl.arange(0, GROUP)
        valid = wanted < num_valid
        threshold = tl.load(values_ptr + row * values_stride + wanted, mask=valid, other=float("inf"))
        # In most chunks of a peaked row nothing exceeds the values.
        if highest > tl.min(threshold, axis=0):
            greater = tl.sum((x[None, :] > threshold[:, None]).to(tl.int32), axis=1)
            tl.atomic_add(counts_ptr + row * num_columns + wanted, greater, mask=valid)

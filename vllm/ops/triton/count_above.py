"""Triton implementation of `count_above`: the logits are read from memory once.

A program holds one chunk of a row in registers and compares it with the row's values. The chunks' counts are added by
integer atomics, whose order does not matter. The last chunk's tail counts as -inf; padding columns stay 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
# Values compared at once: their counts share the barriers of one reduction.
_GROUP = 8


def count_above(logits: Tensor, values: Tensor, num_values: Tensor | None) -> Tensor:
    num_rows, num_columns = values.shape
    counts = torch.zeros((num_rows, num_columns), dtype=torch.int32, device=logits.device)
    if not counts.numel():
        return counts
    vocab_size = logits.shape[1]
    rows = logits, logits.stride(0), vocab_size
    thresholds = values, values.stride(0), num_columns
    valid = counts if num_values is None else num_values, int(num_values is not None)
    grid = num_rows, triton.cdiv(vocab_size, _BLOCK)
    _count_above_kernel[grid](*rows, *thresholds, *valid, counts, BLOCK=_BLOCK, GROUP=_GROUP)
    return counts


# Columns differ from step to step, and values may be columns of a wider table.
@triton.jit(
    do_not_specialize=["values_stride", "num_columns", "has_counts"],
    do_not_specialize_on_alignment=["values_ptr", "num_values_ptr"],
)
def _count_above_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    vocab_size,
    values_ptr,  # float32 [R, W]
    values_stride,
    num_columns,
    num_values_ptr,  # int32 [R], read if has_counts
    has_counts,
    counts_ptr,  # int32 [R, W], zeros
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    highest = tl.max(x, axis=0)
    num_valid = tl.load(num_values_ptr + row, mask=has_counts > 0, other=num_columns)
    for first in range(0, num_valid, GROUP):
        wanted = first + tl.arange(0, GROUP)
        valid = wanted < num_valid
        threshold = tl.load(values_ptr + row * values_stride + wanted, mask=valid, other=float("inf"))
        # In most chunks of a peaked row nothing exceeds the values.
        if highest > tl.min(threshold, axis=0):
            greater = tl.sum((x[None, :] > threshold[:, None]).to(tl.int32), axis=1)
            tl.atomic_add(counts_ptr + row * num_columns + wanted, greater, mask=valid)

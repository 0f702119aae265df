"""Triton implementation of `fill_logprob_token_ids`: a program copies one row's list and writes 0 after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fill_logprob_token_ids(
    columns: Tensor,
    first_column: int,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    list_idx: Tensor,
    num_token_ids: Tensor,
) -> Tensor:
    num_rows, width = columns.shape
    counts = torch.empty(num_rows, dtype=torch.int32, device=columns.device)
    if num_rows:
        targets = columns, columns.stride(0), first_column, width
        lists = token_ids, token_ids.stride(0), list_idx, num_token_ids
        _fill_logprob_token_ids_kernel[(num_rows,)](
            *targets, expanded_idx_mapping, *lists, counts, BLOCK=128, num_warps=1
        )
    return counts


@triton.jit(do_not_specialize=["columns_stride", "first_column", "width", "token_ids_stride"])
def _fill_logprob_token_ids_kernel(
    columns_ptr,  # int32 [L, width]
    columns_stride,
    first_column,
    width,
    expanded_idx_mapping_ptr,  # int32 or int64 [L]
    token_ids_ptr,  # int32 [lists, stored width]
    token_ids_stride,
    list_idx_ptr,  # int32 [S]
    num_token_ids_ptr,  # int32 [S]
    counts_ptr,  # int32 [L]
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(expanded_idx_mapping_ptr + row)
    count = tl.load(num_token_ids_ptr + slot)
    tl.store(counts_ptr + row, count)
    list_ptr = token_ids_ptr + tl.load(list_idx_ptr + slot).to(tl.int64) * token_ids_stride
    for first in range(0, width - first_column, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ids = tl.load(list_ptr + place, mask=place < count, other=0)
        target_ptr = columns_ptr + row * columns_stride + first_column + place
        tl.store(target_ptr, ids, mask=place < width - first_column)

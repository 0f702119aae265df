"""Triton implementation of `keep_bits_`: only what is forbidden is written, and no logit is read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def keep_bits_(logits: Tensor, mask: Tensor, first: int = 0, rows: Tensor | None = None) -> None:
    if not mask.numel() or not logits.numel():
        return
    vocab_size = logits.shape[1]
    grid = (len(mask), triton.cdiv(vocab_size, _BLOCK))
    _keep_bits_kernel[grid](
        logits,
        logits.stride(0),
        vocab_size,
        mask,
        mask.stride(0),
        first,
        mask if rows is None else rows,
        HAS_ROWS=rows is not None,
        BLOCK=_BLOCK,
    )


# logits float32 [L, V], changed in place; mask int32 [R, W]; rows int64 [R] where HAS_ROWS
@triton.jit
def _keep_bits_kernel(
    logits_ptr,
    logits_stride,
    vocab_size,
    mask_ptr,
    mask_stride,
    first,
    rows_ptr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index
    if HAS_ROWS:
        row = tl.load(rows_ptr + index)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < vocab_size
    token = first + column
    words = tl.load(mask_ptr + index * mask_stride + token // 32, mask=is_token, other=-1)
    is_forbidden = (words >> (token % 32)) & 1 == 0
    tl.store(logits_ptr + row * logits_stride + column, float("-inf"), mask=is_token & is_forbidden)

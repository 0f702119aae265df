"""Triton implementation of `topk`: torch.topk over integers whose order is (logit, then lower id).

torch.topk promises nothing about equals, neither which it takes nor their order. A kernel writes each logit as a signed
32-bit integer of the same order, above the complement of its id: all distinct, so the selection has one right answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    keys = torch.empty((num_rows, vocab_size), dtype=torch.int64, device=logits.device)
    if keys.numel():
        _ordered_keys_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
            logits, logits.stride(0), vocab_size, keys, BLOCK=_BLOCK
        )
    best = keys.topk(k, dim=-1).values
    ordered = (best >> 32).to(torch.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(torch.int32)


# logits [R, V], keys int64 [R, V]
@triton.jit
def _ordered_keys_kernel(logits_ptr, logits_stride, vocab_size, keys_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The two zeros are equal.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    # Negative floats grow downwards.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
    tl.store(keys_ptr + row * vocab_size + column, key, mask=inside)

"""Triton implementation of `keep_top_p_`: no sort, no copy of the rows.

One program searches a row's threshold by bisection over the floats' order: the least value h of which all greater
logits together hold less than the share. They stay; of the equals of h as many stay as the share still needs, those
with the lowest ids. A step of the search is one pass over a row, which the second-level cache holds. A row's sums are
taken in one order, so its result does not depend on the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
# The order of -inf among all floats; see _ordered.
_LEAST = tl.constexpr(-2139095041)


def keep_top_p_(logits: Tensor, top_p: Tensor) -> None:
    if logits.numel():
        _keep_top_p_kernel[(len(logits),)](logits, logits.stride(0), logits.shape[1], top_p, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _ordered(logits):
    """Integers in the order of the floats; the two zeros are equal."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _row_block(row_ptr, first, vocab_size, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    return tl.load(row_ptr + column, mask=column < vocab_size, other=float("-inf"))


@triton.jit
def _mass_above(row_ptr, vocab_size, highest, threshold, BLOCK: tl.constexpr):
    """The sum of exp(x - highest) over a row's logits whose order is above `threshold`."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x = _row_block(row_ptr, first, vocab_size, BLOCK)
        sums += tl.where(_ordered(x).to(tl.int64) > threshold, tl.exp(x - highest), 0.0)
    return tl.sum(sums, axis=0)


# logits float32 [R, V], changed in place; top_p float32 [R]
@triton.jit
def _keep_top_p_kernel(logits_ptr, logits_stride, vocab_size, top_p_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for first in range(0, vocab_size, BLOCK):
            maxima = tl.maximum(maxima, _row_block(row_ptr, first, vocab_size, BLOCK))
        highest = tl.max(maxima, axis=0)
        # Above `low` there is the share, above `high` there is not.
        low = tl.full([], _LEAST, dtype=tl.int64)
        high = tl.max(_ordered(maxima).to(tl.int64), axis=0)
        share = top_p * _mass_above(row_ptr, vocab_size, highest, low, BLOCK)
        above = 0.0
        while high - low > 1:
            middle = (low + high) >> 1
            mass = _mass_above(row_ptr, vocab_size, highest, middle, BLOCK)
            if mass < share:
                high = middle
                above = mass
            else:
                low = middle
        bits = high.to(tl.int32)
        border = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        wanted = tl.ceil((share - above) / tl.exp(border - highest))
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 1.0e9).to(tl.int32)
        num_equal = tl.zeros([], dtype=tl.int32)
        for first in range(0, vocab_size, BLOCK):
            x = _row_block(row_ptr, first, vocab_size, BLOCK)
            order = _ordered(x).to(tl.int64)
            equal = (order == high).to(tl.int32)
            place = num_equal + tl.cumsum(equal, axis=0)
            stays = (order > high) | ((equal > 0) & (place <= wanted))
            column = first + tl.arange(0, BLOCK)
            tl.store(row_ptr + column, float("-inf"), mask=(column < vocab_size) & (stays == 0))
            num_equal += tl.sum(equal, axis=0)

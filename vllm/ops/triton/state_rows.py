"""What kernels of states share: which tokens and which state a program has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(slots_ptr, starts_ptr, lengths_ptr, row, slot_stride):
    """First token, the one behind the last, how many the sequence had before, and where the slot begins in its pool."""
    # As wide as what tokens are multiplied with to find their place.
    first = tl.load(starts_ptr + row).to(tl.int64)
    last = tl.load(starts_ptr + row + 1).to(tl.int64)
    before = tl.load(lengths_ptr + row) - (last - first)
    return first, last, before, tl.load(slots_ptr + row).to(tl.int64) * slot_stride


@triton.jit
def softplus(x):
    """ln(1 + e^x), by a series where 1 + e^-|x| would lose digits; elsewhere by a factor for those that are lost."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 + e * (-0.5 + e * (1.0 / 3.0)))
    return tl.maximum(x, 0.0) + tl.where(e < 0.004, series, tl.log(1.0 + e) * (e / ((1.0 + e) - 1.0)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))

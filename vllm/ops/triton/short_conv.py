"""Triton implementation of `short_conv_`: a program has a block of a row's channels, with their last inputs in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid


def short_conv_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    silu: bool,
    before: Tensor | None,
    after: Tensor | None,
) -> Tensor:
    width, channels = weight.shape
    if width not in (2, 3, 4):
        raise ValueError(f"weight must have 2 to 4 rows, got {width}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(256, triton.next_power_of_2(channels))
    grid = (len(state_slots), triton.cdiv(channels, block))
    if not len(state_slots):
        return out
    _short_conv_kernel[grid](
        x,
        x.stride(0),
        weight,
        bias,
        before,
        0 if before is None else before.stride(0),
        after,
        0 if after is None else after.stride(0),
        tail,
        tail.stride(0),
        state_slots,
        query_start_loc,
        seq_lens,
        out,
        channels,
        SILU=silu,
        WIDTH=width,
        BLOCK=block,
    )
    return out


@triton.jit
def _short_conv_kernel(
    x_ptr,  # [T, C]
    x_stride,
    weight_ptr,  # [K, C]
    bias_ptr,  # [C], or None
    before_ptr,  # [T, C], or None
    before_stride,
    after_ptr,  # [T, C], or None
    after_stride,
    tail_ptr,  # [slots, K - 1, C]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, C]
    channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # A sequence that begins has nothing before it.
    kept = at < tl.where(before > 0, channels, 0)
    # The oldest first; a narrower convolution has no use for the first ones.
    old = tl.zeros((BLOCK,), dtype)
    middle = tl.zeros((BLOCK,), dtype)
    if WIDTH > 3:
        old = tl.load(tail_ptr + slot + at, mask=kept, other=0.0)
    if WIDTH > 2:
        middle = tl.load(tail_ptr + slot + (WIDTH - 3) * channels + at, mask=kept, other=0.0)
    new = tl.load(tail_ptr + slot + (WIDTH - 2) * channels + at, mask=kept, other=0.0)
    for token in range(first, last):
        value = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0)
        if before_ptr is not None:
            factor = tl.load(before_ptr + token * before_stride + at, mask=inside, other=0.0)
            value = (value.to(tl.float32) * factor.to(tl.float32)).to(dtype)
        total = tl.zeros((BLOCK,), tl.float32)
        if bias_ptr is not None:
            total = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if WIDTH > 3:
            total += tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) * old.to(tl.float32)
        if WIDTH > 2:
            taps = tl.load(weight_ptr + (WIDTH - 3) * channels + at, mask=inside, other=0.0)
            total += taps.to(tl.float32) * middle.to(tl.float32)
        taps = tl.load(weight_ptr + (WIDTH - 2) * channels + at, mask=inside, other=0.0)
        total += taps.to(tl.float32) * new.to(tl.float32)
        taps = tl.load(weight_ptr + (WIDTH - 1) * channels + at, mask=inside, other=0.0)
        total += taps.to(tl.float32) * value.to(tl.float32)
        old = middle
        middle = new
        new = value
        if SILU:
            total = total * sigmoid(total)
        if after_ptr is not None:
            total *= tl.load(after_ptr + token * after_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * channels + at, total.to(dtype), mask=inside)
    if WIDTH > 3:
        tl.store(tail_ptr + slot + at, old, mask=inside)
    if WIDTH > 2:
        tl.store(tail_ptr + slot + (WIDTH - 3) * channels + at, middle, mask=inside)
    tl.store(tail_ptr + slot + (WIDTH - 2) * channels + at, new, mask=inside)

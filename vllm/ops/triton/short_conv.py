"""Triton implementation of `short_conv_`: a program has a block of a row's channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, with_strides


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
    if not 2 <= width <= 8:
        raise ValueError(f"weight must have 2 to 8 rows, got {width}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(256, triton.next_power_of_2(channels))
    grid = (len(state_slots), triton.cdiv(channels, block))
    if not len(state_slots):
        return out
    _short_conv_kernel[grid](
        *with_strides(x),
        *(weight, bias),
        *with_strides(before, after, tail),
        *(state_slots, query_start_loc, seq_lens, out, channels),
        SILU=silu,
        WIDTH=width,
        BLOCK=block,
    )
    return out


# A row's input at a place, which may be one of those before its first token, in the tail.
@triton.jit
def _input(
    x_ptr, x_stride, before_ptr, before_stride, tail_ptr, place, first, before, at, channels, WIDTH: tl.constexpr
):
    in_row = at < tl.where(place >= first, channels, 0)
    value = tl.load(x_ptr + place * x_stride + at, mask=in_row, other=0.0)
    if before_ptr is not None:
        factor = tl.load(before_ptr + place * before_stride + at, mask=in_row, other=0.0)
        value = (value.to(tl.float32) * factor.to(tl.float32)).to(x_ptr.dtype.element_ty)
    # A sequence that begins has nothing before it.
    in_tail = at < tl.where((place < first) & (before > 0), channels, 0)
    kept = tl.load(tail_ptr + (place - first + WIDTH - 1) * channels + at, mask=in_tail, other=0.0)
    return tl.where(in_row, value, kept)


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
    tail_ptr += slot
    for token in range(first, last):
        total = tl.zeros((BLOCK,), tl.float32)
        if bias_ptr is not None:
            total = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(WIDTH):
            place = token + (k + 1 - WIDTH)
            value = _input(
                x_ptr, x_stride, before_ptr, before_stride, tail_ptr, place, first, before, at, channels, WIDTH
            )
            total += tl.load(weight_ptr + k * channels + at, mask=inside, other=0.0).to(tl.float32) * value.to(
                tl.float32
            )
        if SILU:
            total = total * sigmoid(total)
        if after_ptr is not None:
            total *= tl.load(after_ptr + token * after_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * channels + at, total.to(out_ptr.dtype.element_ty), mask=inside)
    # Each comes from behind itself.
    for k in tl.static_range(WIDTH - 1):
        place = last + (k + 1 - WIDTH)
        value = _input(x_ptr, x_stride, before_ptr, before_stride, tail_ptr, place, first, before, at, channels, WIDTH)
        tl.store(tail_ptr + k * channels + at, value, mask=inside)

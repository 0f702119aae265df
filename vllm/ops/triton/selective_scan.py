"""Triton implementation of `selective_scan_`: a program has a block of a row's channels, with their states in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, softplus, with_strides

# Values of states that a program holds.
_STATE = 2048


def selective_scan_(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor | None,
    rate: Tensor,
    bias: Tensor | None,
    skip: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    _, size, channels = pool.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(state_slots):
        return out
    size_block = triton.next_power_of_2(size)
    groups = b.shape[1] // size
    width = channels // groups
    block = max(1, min(_STATE // size_block, triton.next_power_of_2(width)))
    _selective_scan_kernel[(len(state_slots), triton.cdiv(width, block), groups)](
        *with_strides(x, dt, b, c, gate),
        *(rate, bias, skip),
        *with_strides(pool),
        *(state_slots, query_start_loc, seq_lens, out, channels, width),
        SIZE=size,
        SIZE_BLOCK=size_block,
        BLOCK=block,
    )
    return out


@triton.jit
def _selective_scan_kernel(
    x_ptr,  # [T, C]
    x_stride,
    dt_ptr,  # [T, C]
    dt_stride,
    b_ptr,  # [T, G * N]
    b_stride,
    c_ptr,  # [T, G * N]
    c_stride,
    gate_ptr,  # [T, C], or None
    gate_stride,
    rate_ptr,  # [N, C]
    bias_ptr,  # [C], or None
    skip_ptr,  # [C]
    pool_ptr,  # [slots, N, C]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, C]
    channels,
    width,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    i = tl.arange(0, SIZE_BLOCK)
    group = tl.program_id(2)
    of_group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = group * width + of_group
    is_key = i < SIZE
    # A sequence that begins has nothing before it.
    is_kept = i < tl.where(before > 0, SIZE, 0)
    is_channel = of_group < width
    inside = is_key[:, None] & is_channel[None, :]
    at = i[:, None] * channels + j[None, :]
    state = tl.load(pool_ptr + slot + at, mask=inside & is_kept[:, None], other=0.0)
    rate = tl.load(rate_ptr + at, mask=inside, other=0.0)
    skip = tl.load(skip_ptr + j, mask=is_channel, other=0.0)
    for token in range(first, last):
        x = tl.load(x_ptr + token * x_stride + j, mask=is_channel, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + token * dt_stride + j, mask=is_channel, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            step += tl.load(bias_ptr + j, mask=is_channel, other=0.0)
        step = softplus(step)
        b = tl.load(b_ptr + token * b_stride + group * SIZE + i, mask=is_key, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + group * SIZE + i, mask=is_key, other=0.0).to(tl.float32)
        state = state * tl.exp(-step[None, :] * rate) + (step * x)[None, :] * b[:, None]
        result = tl.sum(state * c[:, None], axis=0) + skip * x
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + token * gate_stride + j, mask=is_channel, other=0.0).to(tl.float32)
            result *= gate * sigmoid(gate)
        tl.store(out_ptr + token * channels + j, result.to(out_ptr.dtype.element_ty), mask=is_channel)
    if first < last:
        tl.store(pool_ptr + slot + at, state, mask=inside)

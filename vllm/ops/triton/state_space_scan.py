"""Triton implementation of `state_space_scan_`: a program has a block of columns of a head's state, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, softplus

# Values of a state that a program holds.
_STATE = 4096


def state_space_scan_(
    xbc: Tensor,
    dt: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor | None,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    groups: int,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    _, heads, size, width = pool.shape
    out = torch.empty((len(xbc), heads * width), dtype=xbc.dtype, device=xbc.device)
    if not len(state_slots):
        return out
    size_block = triton.next_power_of_2(size)
    block = max(1, min(_STATE // size_block, triton.next_power_of_2(width)))
    _state_space_scan_kernel[(len(state_slots), heads, triton.cdiv(width, block))](
        xbc,
        xbc.stride(0),
        dt,
        dt.stride(0),
        rate,
        bias,
        skip,
        pool,
        pool.stride(0),
        state_slots,
        query_start_loc,
        seq_lens,
        out,
        heads,
        groups,
        dt_min,
        dt_max,
        SIZE=size,
        WIDTH=width,
        SIZE_BLOCK=size_block,
        BLOCK=block,
    )
    return out


@triton.jit
def _state_space_scan_kernel(
    xbc_ptr,  # [T, H * P + 2 * G * N]
    xbc_stride,
    dt_ptr,  # [T, H]
    dt_stride,
    rate_ptr,  # [H]
    bias_ptr,  # [H]
    skip_ptr,  # [H], or None
    pool_ptr,  # [slots, H, N, P]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H * P]
    heads,
    groups,
    dt_min,
    dt_max,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    head = tl.program_id(1)
    group = head // (heads // groups)
    i = tl.arange(0, SIZE_BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < SIZE
    # A sequence that begins has nothing before it.
    is_kept = i < tl.where(before > 0, SIZE, 0)
    is_value = j < WIDTH
    inside = is_key[:, None] & is_value[None, :]
    places = pool_ptr + slot + head * (SIZE * WIDTH) + i[:, None] * WIDTH + j[None, :]
    state = tl.load(places, mask=inside & is_kept[:, None], other=0.0)
    rate = tl.load(rate_ptr + head)
    bias = tl.load(bias_ptr + head)
    for token in range(first, last):
        row = xbc_ptr + token * xbc_stride
        x = tl.load(row + head * WIDTH + j, mask=is_value, other=0.0).to(tl.float32)
        b = tl.load(row + heads * WIDTH + group * SIZE + i, mask=is_key, other=0.0).to(tl.float32)
        c = tl.load(row + heads * WIDTH + (groups + group) * SIZE + i, mask=is_key, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, dt_min), dt_max)
        state = state * tl.exp(-rate * step) + b[:, None] * (x * step)[None, :]
        result = tl.sum(state * c[:, None], axis=0)
        if skip_ptr is not None:
            result += tl.load(skip_ptr + head) * x
        to = out_ptr + (token * heads + head) * WIDTH + j
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_value)
    if first < last:
        tl.store(places, state, mask=inside)

"""Triton implementation of `gated_recurrence_`: a program has a block of a row's channels, with their numbers in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, with_strides


def gated_recurrence_(
    x: Tensor,
    input_gate: Tensor,
    kept_gate: Tensor,
    input_bias: Tensor,
    kept_bias: Tensor,
    rate: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    channels = pool.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(state_slots):
        return out
    block = min(256, triton.next_power_of_2(channels))
    _gated_recurrence_kernel[(len(state_slots), triton.cdiv(channels, block))](
        *with_strides(x, input_gate, kept_gate),
        *(input_bias, kept_bias, rate),
        *with_strides(pool),
        *(state_slots, query_start_loc, seq_lens, out, channels),
        BLOCK=block,
    )
    return out


@triton.jit
def _gated_recurrence_kernel(
    x_ptr,  # [T, C]
    x_stride,
    input_ptr,  # [T, C]
    input_stride,
    kept_ptr,  # [T, C]
    kept_stride,
    input_bias_ptr,  # [C]
    kept_bias_ptr,  # [C]
    rate_ptr,  # [C]
    pool_ptr,  # [slots, C]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, C]
    channels,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    # A sequence that begins has nothing before it.
    state = tl.load(pool_ptr + slot + at, mask=at < tl.where(before > 0, channels, 0), other=0.0)
    input_bias = tl.load(input_bias_ptr + at, mask=inside, other=0.0)
    kept_bias = tl.load(kept_bias_ptr + at, mask=inside, other=0.0)
    rate = tl.load(rate_ptr + at, mask=inside, other=0.0)
    for token in range(first, last):
        x = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(input_ptr + token * input_stride + at, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + token * kept_stride + at, mask=inside, other=0.0).to(tl.float32)
        log = -rate * sigmoid(kept + kept_bias)
        twice = 2.0 * log
        series = -twice * (1.0 + twice * (0.5 + twice * (1.0 / 6.0 + twice * (1.0 / 24.0))))
        share = tl.sqrt(tl.where(twice > -0.03, series, 1.0 - tl.exp(twice)))
        begins = at < tl.where(token + before == first, channels, 0)
        share = tl.where(begins, 1.0, share)
        state = state * tl.exp(log) + share * sigmoid(gate + input_bias) * x
        tl.store(out_ptr + token * channels + at, state.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(pool_ptr + slot + at, state, mask=inside)

"""Triton implementation of `wkv_`: a program has a block of a row's channels, with their sums in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, with_strides


def wkv_(
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    rate: Tensor,
    bonus: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    channels = pool.shape[2]
    out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if not len(state_slots):
        return out
    block = min(256, triton.next_power_of_2(channels))
    _wkv_kernel[(len(state_slots), triton.cdiv(channels, block))](
        *with_strides(key, value, gate),
        *(rate, bonus),
        *with_strides(pool),
        *(state_slots, query_start_loc, seq_lens, out, channels),
        BLOCK=block,
    )
    return out


@triton.jit
def _wkv_kernel(
    key_ptr,  # [T, C]
    key_stride,
    value_ptr,  # [T, C]
    value_stride,
    gate_ptr,  # [T, C]
    gate_stride,
    rate_ptr,  # [C]
    bonus_ptr,  # [C]
    pool_ptr,  # [slots, 3, C]
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
    is_kept = at < tl.where(before > 0, channels, 0)
    places = pool_ptr + slot + at
    total = tl.load(places, mask=is_kept, other=0.0)
    weights = tl.load(places + channels, mask=is_kept, other=0.0)
    peak = tl.load(places + 2 * channels, mask=is_kept, other=-1e38)
    rate = tl.load(rate_ptr + at, mask=inside, other=0.0)
    bonus = tl.load(bonus_ptr + at, mask=inside, other=0.0)
    for token in range(first, last):
        k = tl.load(key_ptr + token * key_stride + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(value_ptr + token * value_stride + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        greatest = tl.maximum(peak, k + bonus)
        earlier = tl.exp(peak - greatest)
        now = tl.exp(k + bonus - greatest)
        mean = (earlier * total + now * v) / (earlier * weights + now)
        tl.store(out_ptr + token * channels + at, (sigmoid(gate) * mean).to(out_ptr.dtype.element_ty), mask=inside)
        after = tl.maximum(peak - rate, k)
        kept = tl.exp((peak - after) - rate)
        added = tl.exp(k - after)
        total = kept * total + added * v
        weights = kept * weights + added
        peak = after
    if first < last:
        tl.store(places, total, mask=inside)
        tl.store(places + channels, weights, mask=inside)
        tl.store(places + 2 * channels, peak, mask=inside)

"""Triton implementation of `mlstm_`: of each token of a head first what decays, what is written and what is divided by;
then a program has a block of columns of a head's matrix, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, softplus, with_strides

# Values of a matrix that a program holds.
_STATE = 4096


def mlstm_(
    qkv: Tensor,
    gates: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_dim: int,
    cap: float,
    eps: float,
) -> Tensor:
    _, heads, size = pool.shape
    width = (size - key_dim - 1) // key_dim
    out = torch.empty((len(qkv), heads * width), dtype=qkv.dtype, device=qkv.device)
    if not len(state_slots):
        return out
    factors = torch.empty((len(qkv), heads, 3), dtype=torch.float32, device=qkv.device)
    # Threads may still read what they would replace in the pool.
    after = torch.empty((len(state_slots), heads, key_dim + 1), dtype=torch.float32, device=qkv.device)
    rows = state_slots, query_start_loc, seq_lens
    key_block = triton.next_power_of_2(key_dim)
    _factors_kernel[(len(state_slots), heads)](
        *with_strides(qkv, gates, pool),
        *(*rows, factors, after, heads, cap, eps, key_dim**-0.5),
        KEYS=key_dim,
        WIDTH=width,
        KEY_BLOCK=key_block,
    )
    block = max(1, min(_STATE // key_block, triton.next_power_of_2(width)))
    _matrix_kernel[(len(state_slots), heads, triton.cdiv(width, block))](
        *with_strides(qkv, pool),
        *(*rows, factors, after, out, heads, key_dim**-0.5),
        KEYS=key_dim,
        WIDTH=width,
        KEY_BLOCK=key_block,
        BLOCK=block,
    )
    return out


@triton.jit
def _capped(x, cap):
    """cap * tanh(x / cap), by a series where it is small."""
    y = x / cap
    squared = y * y
    series = y * (1.0 + squared * (-1.0 / 3.0 + squared * (2.0 / 15.0 - squared * (17.0 / 315.0))))
    return cap * tl.where(tl.abs(y) < 0.2, series, 2.0 * sigmoid(2.0 * y) - 1.0)


@triton.jit
def _factors_kernel(
    qkv_ptr,  # [T, H * (2 * K + V)]
    qkv_stride,
    gates_ptr,  # [T, 2 * H]
    gates_stride,
    pool_ptr,  # [slots, H, K * V + K + 1]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    factors_ptr,  # [T, H, 3]
    after_ptr,  # [R, H, K + 1]
    heads,
    cap,
    eps,
    query_scale,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    head = tl.program_id(1)
    i = tl.arange(0, KEY_BLOCK)
    is_key = i < KEYS
    # A sequence that begins has nothing before it.
    is_kept = i < tl.where(before > 0, KEYS, 0)
    places = pool_ptr + slot + head * (KEYS * WIDTH + KEYS + 1) + KEYS * WIDTH
    norm = tl.load(places + i, mask=is_kept, other=0.0)
    peak = tl.load(places + KEYS, mask=before > 0, other=0.0)
    for token in range(first, last):
        row = qkv_ptr + token * qkv_stride + head * KEYS + i
        q = tl.load(row, mask=is_key, other=0.0).to(tl.float32) * query_scale
        k = tl.load(row + heads * KEYS, mask=is_key, other=0.0).to(tl.float32)
        gates = gates_ptr + token * gates_stride + head
        given = _capped(tl.load(gates).to(tl.float32), cap)
        loss = softplus(-_capped(tl.load(gates + heads).to(tl.float32), cap))
        now = tl.maximum(peak - loss, given)
        decay = tl.exp((peak - now) - loss)
        peak = now
        scale = tl.exp(given - peak)
        norm = norm * decay + k * scale
        divisor = tl.maximum(tl.abs(tl.sum(q * norm, axis=0)), tl.exp(-peak)) + eps
        to = factors_ptr + (token * heads + head) * 3
        tl.store(to, decay)
        tl.store(to + 1, scale)
        tl.store(to + 2, divisor)
    to = after_ptr + (tl.program_id(0) * heads + head) * (KEYS + 1)
    tl.store(to + i, norm, mask=is_key)
    tl.store(to + KEYS, peak)


@triton.jit
def _matrix_kernel(
    qkv_ptr,  # [T, H * (2 * K + V)]
    qkv_stride,
    pool_ptr,  # [slots, H, K * V + K + 1]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    factors_ptr,  # [T, H, 3]
    after_ptr,  # [R, H, K + 1]
    out_ptr,  # [T, H * V]
    heads,
    query_scale,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    head = tl.program_id(1)
    i = tl.arange(0, KEY_BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < KEYS
    is_kept = i < tl.where(before > 0, KEYS, 0)
    is_value = j < WIDTH
    inside = is_key[:, None] & is_value[None, :]
    places = pool_ptr + slot + head * (KEYS * WIDTH + KEYS + 1) + i[:, None] * WIDTH + j[None, :]
    state = tl.load(places, mask=inside & is_kept[:, None], other=0.0)
    for token in range(first, last):
        row = qkv_ptr + token * qkv_stride
        q = tl.load(row + head * KEYS + i, mask=is_key, other=0.0).to(tl.float32) * query_scale
        k = tl.load(row + (heads + head) * KEYS + i, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(row + 2 * heads * KEYS + head * WIDTH + j, mask=is_value, other=0.0).to(tl.float32)
        factors = factors_ptr + (token * heads + head) * 3
        state = state * tl.load(factors) + k[:, None] * (v * tl.load(factors + 1))[None, :]
        result = tl.sum(state * q[:, None], axis=0) / tl.load(factors + 2)
        to = out_ptr + (token * heads + head) * WIDTH + j
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_value)
    if first < last:
        tl.store(places, state, mask=inside)
        if tl.program_id(2) == 0:
            after = after_ptr + (tl.program_id(0) * heads + head) * (KEYS + 1)
            to = pool_ptr + slot + head * (KEYS * WIDTH + KEYS + 1) + KEYS * WIDTH
            tl.store(to + i, tl.load(after + i, mask=is_key, other=0.0), mask=is_key)
            tl.store(to + KEYS, tl.load(after + KEYS))

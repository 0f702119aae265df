"""Triton implementation of `gated_delta_rule_`: a program has a block of columns of a head's state, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import row_of, sigmoid, softplus

# Values of a state that a program holds.
_STATE = 4096


def gated_delta_rule_(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_heads: int,
    beta_scale: float,
    bound: float,
    eps: float,
) -> Tensor:
    _, heads, keys, values = pool.shape
    out = torch.empty((len(qkv), heads * values), dtype=qkv.dtype, device=qkv.device)
    if not len(state_slots):
        return out
    key_block = triton.next_power_of_2(keys)
    block = max(1, min(_STATE // key_block, triton.next_power_of_2(values)))
    _gated_delta_rule_kernel[(len(state_slots), heads, triton.cdiv(values, block))](
        qkv,
        qkv.stride(0),
        decay,
        decay.stride(0),
        beta,
        beta.stride(0),
        rate,
        bias,
        pool,
        pool.stride(0),
        state_slots,
        query_start_loc,
        seq_lens,
        out,
        heads,
        key_heads,
        beta_scale,
        bound,
        eps,
        keys**-0.5,
        BY_CHANNEL=decay.shape[1] != heads,
        BOUNDED=bound < 0,
        KEYS=keys,
        VALUES=values,
        KEY_BLOCK=key_block,
        BLOCK=block,
    )
    return out


@triton.jit
def _decay(x, rate, bound, BOUNDED: tl.constexpr):
    if BOUNDED:
        return tl.exp(bound * sigmoid(rate * x))
    return tl.exp(-rate * softplus(x))


@triton.jit
def _gated_delta_rule_kernel(
    qkv_ptr,  # [T, 2 * Hk * Dk + Hv * Dv]
    qkv_stride,
    decay_ptr,  # [T, Hv], or [T, Hv * Dk]
    decay_stride,
    beta_ptr,  # [T, Hv]
    beta_stride,
    rate_ptr,  # [Hv]
    bias_ptr,  # as a row of decay
    pool_ptr,  # [slots, Hv, Dk, Dv]
    slot_stride,
    slots_ptr,  # [R]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, Hv * Dv]
    heads,
    key_heads,
    beta_scale,
    bound,
    eps,
    query_scale,
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last, before, slot = row_of(slots_ptr, starts_ptr, lengths_ptr, tl.program_id(0), slot_stride)
    head = tl.program_id(1)
    key_head = head // (heads // key_heads)
    i = tl.arange(0, KEY_BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < KEYS
    # A sequence that begins has nothing before it.
    is_kept = i < tl.where(before > 0, KEYS, 0)
    is_value = j < VALUES
    inside = is_key[:, None] & is_value[None, :]
    places = pool_ptr + slot + head * (KEYS * VALUES) + i[:, None] * VALUES + j[None, :]
    state = tl.load(places, mask=inside & is_kept[:, None], other=0.0)
    rate = tl.load(rate_ptr + head)
    if BY_CHANNEL:
        bias = tl.load(bias_ptr + head * KEYS + i, mask=is_key, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    for token in range(first, last):
        row = qkv_ptr + token * qkv_stride
        q = tl.load(row + key_head * KEYS + i, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(row + (key_heads + key_head) * KEYS + i, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(row + 2 * key_heads * KEYS + head * VALUES + j, mask=is_value, other=0.0).to(tl.float32)
        q = q * (query_scale / tl.sqrt(tl.sum(q * q, axis=0) + eps))
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + eps)
        if BY_CHANNEL:
            x = tl.load(decay_ptr + token * decay_stride + head * KEYS + i, mask=is_key, other=0.0).to(tl.float32)
            state = state * _decay(x + bias, rate, bound, BOUNDED)[:, None]
        else:
            x = tl.load(decay_ptr + token * decay_stride + head).to(tl.float32)
            state = state * _decay(x + bias, rate, bound, BOUNDED)
        written = beta_scale * sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
        lacking = v - tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (lacking * written)[None, :]
        result = tl.sum(state * q[:, None], axis=0)
        to = out_ptr + (token * heads + head) * VALUES + j
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_value)
    if first < last:
        tl.store(places, state, mask=inside)

"""Triton implementation of `gated_delta_rule_`: a program has a block of columns of a head's state, in registers. Where
all of it decays alike, whole chunks of a prompt are products of matrices (arXiv:2412.06464, section 3.3), for which the
state is in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import (
    CHUNK,
    KEY_TILE,
    chunks_of,
    decays_between,
    row_of,
    sigmoid,
    softplus,
    takes_chunks,
    with_strides,
    write_chunk,
)

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
    by_channel = decay.shape[1] != heads
    chunk = CHUNK if takes_chunks(len(qkv), len(state_slots)) and not by_channel else 0
    # A product's sides have 16 values at least.
    least = 16 if chunk else 1
    key_block = max(least, triton.next_power_of_2(keys))
    block = max(least, min(_STATE // key_block, triton.next_power_of_2(values)))
    _gated_delta_rule_kernel[(len(state_slots), heads, triton.cdiv(values, block))](
        *with_strides(qkv, decay, beta),
        *(rate, bias),
        *with_strides(pool),
        *(state_slots, query_start_loc, seq_lens, out, heads, key_heads, beta_scale, bound, eps, keys**-0.5),
        BY_CHANNEL=by_channel,
        BOUNDED=bound < 0,
        KEYS=keys,
        VALUES=values,
        KEY_BLOCK=key_block,
        BLOCK=block,
        CHUNK=chunk,
        TILE=min(KEY_TILE, key_block),
    )
    return out


@triton.jit
def _log_decay(x, rate, bound, BOUNDED: tl.constexpr):
    if BOUNDED:
        return bound * sigmoid(rate * x)
    return -rate * softplus(x)


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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
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
    # Where a token's query, key, value and result begin.
    q_at = qkv_ptr + key_head * KEYS
    k_at = q_at + key_heads * KEYS
    v_at = qkv_ptr + 2 * key_heads * KEYS + head * VALUES
    to = out_ptr + head * VALUES
    out_stride = heads * VALUES
    begin = last
    if CHUNK:
        begin, count = chunks_of(first, last, before, CHUNK)
    for token in range(first, begin):
        if BY_CHANNEL:
            x = tl.load(decay_ptr + token * decay_stride + head * KEYS + i, mask=is_key, other=0.0).to(tl.float32)
            state = state * tl.exp(_log_decay(x + bias, rate, bound, BOUNDED))[:, None]
        else:
            x = tl.load(decay_ptr + token * decay_stride + head).to(tl.float32)
            state = state * tl.exp(_log_decay(x + bias, rate, bound, BOUNDED))
        written = beta_scale * sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
        at = token * qkv_stride
        row = to + token * out_stride
        state = _delta_one(state, at, q_at, k_at, v_at, written, query_scale, eps, row, i, j, is_key, is_value)
    if first < last:
        tl.store(places, state, mask=inside)
    if CHUNK:
        rest = begin + count * CHUNK
        for token in range(begin, rest, CHUNK):
            tokens = token + tl.arange(0, CHUNK)
            at = tokens[:, None] * qkv_stride
            v = tl.load(v_at + at + j[None, :], mask=is_value[None, :], other=0.0).to(tl.float32)
            written = beta_scale * sigmoid(tl.load(beta_ptr + tokens * beta_stride + head).to(tl.float32))
            x = tl.load(decay_ptr + tokens * decay_stride + head).to(tl.float32)
            logs = _log_decay(x + bias, rate, bound, BOUNDED)
            rows = to + tokens[:, None] * out_stride + j[None, :]
            state_at = pool_ptr + slot + head * (KEYS * VALUES) + j[None, :]
            result = _delta_chunk(
                state_at, q_at + at, k_at + at, v, written, logs, query_scale, eps, is_value, KEYS, VALUES, CHUNK, TILE
            )
            tl.store(rows, result.to(out_ptr.dtype.element_ty), mask=is_value[None, :])
        if rest < last:
            tl.debug_barrier()
            state = tl.load(places, mask=inside, other=0.0)
            for token in range(rest, last):
                written = beta_scale * sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
                x = tl.load(decay_ptr + token * decay_stride + head).to(tl.float32)
                state = state * tl.exp(_log_decay(x + bias, rate, bound, BOUNDED))
                at = token * qkv_stride
                row = to + token * out_stride
                state = _delta_one(state, at, q_at, k_at, v_at, written, query_scale, eps, row, i, j, is_key, is_value)
            tl.debug_barrier()
            tl.store(places, state, mask=inside)


@triton.jit
def _delta_chunk(
    state_ptr,  # [Dk, Dv], a block of its columns
    q_ptr,  # [C, Dk]
    k_ptr,  # [C, Dk]
    v,  # [C, Dv]
    written,  # [C]
    logs,  # [C]
    query_scale,
    eps,
    is_value,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The results of a chunk's tokens, [C, Dv]; the state in memory becomes that after them."""
    between, kept = decays_between(logs, CHUNK)
    tl.debug_barrier()
    result = tl.zeros([CHUNK, v.shape[1]], dtype=tl.float32)
    recalled = tl.zeros([CHUNK, v.shape[1]], dtype=tl.float32)
    weights = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    q_squares = tl.zeros([CHUNK], dtype=tl.float32)
    k_squares = tl.zeros([CHUNK], dtype=tl.float32)
    for key in range(0, KEYS, TILE):
        i = key + tl.arange(0, TILE)
        state = tl.load(state_ptr + i[:, None] * VALUES, mask=(i < KEYS)[:, None] & is_value[None, :], other=0.0)
        q = tl.load(q_ptr + i[None, :], mask=(i < KEYS)[None, :], other=0.0).to(tl.float32)
        k = tl.load(k_ptr + i[None, :], mask=(i < KEYS)[None, :], other=0.0).to(tl.float32)
        result = tl.dot(q, state, result, input_precision="ieee")
        recalled = tl.dot(k, state, recalled, input_precision="ieee")
        weights = tl.dot(q, tl.trans(k), weights, input_precision="ieee")
        alike = tl.dot(k, tl.trans(k), alike, input_precision="ieee")
        q_squares += tl.sum(q * q, axis=1)
        k_squares += tl.sum(k * k, axis=1)
    q_factors = query_scale / tl.sqrt(q_squares + eps)
    k_factors = 1.0 / tl.sqrt(k_squares + eps)
    lacking = (v - recalled * (kept * k_factors)[:, None]) * written[:, None]
    between *= k_factors[None, :]
    lacking = _solved(alike * between * (written * k_factors)[:, None], lacking, CHUNK)
    weights *= between * q_factors[:, None]
    result = tl.dot(weights, lacking, result * (kept * q_factors)[:, None], input_precision="ieee")
    is_last = tl.arange(0, CHUNK) == CHUNK - 1
    lacking = lacking * tl.sum(tl.where(is_last[:, None], between, 0.0), axis=0)[:, None]
    left = tl.sum(tl.where(is_last, kept, 0.0), axis=0)
    write_chunk(state_ptr, k_ptr, lacking, left, is_value, KEYS, VALUES, TILE)
    return result


@triton.jit
def _delta_one(state, at, q_ptr, k_ptr, v_ptr, written, query_scale, eps, out_ptr, i, j, is_key, is_value):
    """The state, which has decayed, after a token, whose result is stored."""
    q = tl.load(q_ptr + at + i, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at + i, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at + j, mask=is_value, other=0.0).to(tl.float32)
    q = q * (query_scale / tl.sqrt(tl.sum(q * q, axis=0) + eps))
    k = k / tl.sqrt(tl.sum(k * k, axis=0) + eps)
    lacking = v - tl.sum(state * k[:, None], axis=0)
    state += k[:, None] * (lacking * written)[None, :]
    result = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + j, result.to(out_ptr.dtype.element_ty), mask=is_value)
    return state


@triton.jit
def _solved(lower, x, CHUNK: tl.constexpr):
    """The solution y of y + L y = x, where L is what `lower` [C, C] has below its diagonal, and x is [C, B]: row after
    row, since powers of L may be large."""
    t = tl.arange(0, CHUNK)
    lower = tl.where(t[:, None] > t[None, :], lower, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(t[:, None] == row, lower, 0.0), axis=0)
        x = tl.where(t[:, None] == row, x - tl.sum(factors[:, None] * x, axis=0)[None, :], x)
    return x

"""Triton implementation of `state_space_scan_`: a program has a block of columns of a head's state, in registers. Whole
chunks of a prompt are products of matrices (arXiv:2405.21060, section 6), for which the state is in memory."""

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
    softplus,
    takes_chunks,
    with_strides,
    write_chunk,
)

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
    chunk = CHUNK if takes_chunks(len(xbc), len(state_slots)) else 0
    # A product's sides have 16 values at least.
    least = 16 if chunk else 1
    size_block = max(least, triton.next_power_of_2(size))
    block = max(least, min(_STATE // size_block, triton.next_power_of_2(width)))
    _state_space_scan_kernel[(len(state_slots), heads, triton.cdiv(width, block))](
        *with_strides(xbc, dt),
        *(rate, bias, skip),
        *with_strides(pool),
        *(state_slots, query_start_loc, seq_lens, out, heads, groups, dt_min, dt_max),
        SIZE=size,
        WIDTH=width,
        SIZE_BLOCK=size_block,
        BLOCK=block,
        CHUNK=chunk,
        TILE=min(KEY_TILE, size_block),
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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
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
    begin = last
    if CHUNK:
        begin, count = chunks_of(first, last, before, CHUNK)
    skip = 0.0
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head)
    # Where a token's x, B and C begin.
    x_at = xbc_ptr + head * WIDTH
    b_at = xbc_ptr + heads * WIDTH + group * SIZE
    c_at = b_at + groups * SIZE
    to = out_ptr + head * WIDTH
    out_stride = heads * WIDTH
    for token in range(first, begin):
        step = _scan_steps(dt_ptr + token * dt_stride + head, bias, dt_min, dt_max)
        row = to + token * out_stride
        state = _scan_one(state, token * xbc_stride, x_at, b_at, c_at, step, rate, skip, row, i, j, is_key, is_value)
    if first < last:
        tl.store(places, state, mask=inside)
    if CHUNK:
        rest = begin + count * CHUNK
        for token in range(begin, rest, CHUNK):
            tokens = token + tl.arange(0, CHUNK)
            at = tokens[:, None] * xbc_stride
            steps = _scan_steps(dt_ptr + tokens * dt_stride + head, bias, dt_min, dt_max)
            x = tl.load(x_at + at + j[None, :], mask=is_value[None, :], other=0.0).to(tl.float32)
            rows = to + tokens[:, None] * out_stride + j[None, :]
            state_at = pool_ptr + slot + head * (SIZE * WIDTH) + j[None, :]
            result = _scan_chunk(
                state_at, b_at + at, c_at + at, x, steps, -rate * steps, skip, is_value, SIZE, WIDTH, CHUNK, TILE
            )
            tl.store(rows, result.to(out_ptr.dtype.element_ty), mask=is_value[None, :])
        if rest < last:
            tl.debug_barrier()
            state = tl.load(places, mask=inside, other=0.0)
            for token in range(rest, last):
                step = _scan_steps(dt_ptr + token * dt_stride + head, bias, dt_min, dt_max)
                row = to + token * out_stride
                state = _scan_one(
                    state, token * xbc_stride, x_at, b_at, c_at, step, rate, skip, row, i, j, is_key, is_value
                )
            tl.debug_barrier()
            tl.store(places, state, mask=inside)


@triton.jit
def _scan_chunk(
    state_ptr,  # [N, P], a block of its columns
    b_ptr,  # [C, N]
    c_ptr,  # [C, N]
    x,  # [C, P]
    steps,  # [C]
    logs,  # [C]
    skip,
    is_value,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The results of a chunk's tokens, [C, P]; the state in memory becomes that after them."""
    between, kept = decays_between(logs, CHUNK)
    tl.debug_barrier()
    result = tl.zeros([CHUNK, x.shape[1]], dtype=tl.float32)
    weights = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for key in range(0, SIZE, TILE):
        i = key + tl.arange(0, TILE)
        state = tl.load(state_ptr + i[:, None] * WIDTH, mask=(i < SIZE)[:, None] & is_value[None, :], other=0.0)
        b = tl.load(b_ptr + i[None, :], mask=(i < SIZE)[None, :], other=0.0).to(tl.float32)
        c = tl.load(c_ptr + i[None, :], mask=(i < SIZE)[None, :], other=0.0).to(tl.float32)
        result = tl.dot(c, state, result, input_precision="ieee")
        weights = tl.dot(c, tl.trans(b), weights, input_precision="ieee")
    inputs = x * steps[:, None]
    result = tl.dot(weights * between, inputs, result * kept[:, None] + skip * x, input_precision="ieee")
    is_last = tl.arange(0, CHUNK) == CHUNK - 1
    inputs = inputs * tl.sum(tl.where(is_last[:, None], between, 0.0), axis=0)[:, None]
    left = tl.sum(tl.where(is_last, kept, 0.0), axis=0)
    write_chunk(state_ptr, b_ptr, inputs, left, is_value, SIZE, WIDTH, TILE)
    return result


@triton.jit
def _scan_steps(dt_ptr, bias, dt_min, dt_max):
    steps = softplus(tl.load(dt_ptr).to(tl.float32) + bias)
    return tl.minimum(tl.maximum(steps, dt_min), dt_max)


@triton.jit
def _scan_one(state, at, x_ptr, b_ptr, c_ptr, step, rate, skip, out_ptr, i, j, is_key, is_value):
    """The state after a token, whose result is stored."""
    x = tl.load(x_ptr + at + j, mask=is_value, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at + i, mask=is_key, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + at + i, mask=is_key, other=0.0).to(tl.float32)
    state = state * tl.exp(-rate * step) + b[:, None] * (x * step)[None, :]
    result = tl.sum(state * c[:, None], axis=0) + skip * x
    tl.store(out_ptr + j, result.to(out_ptr.dtype.element_ty), mask=is_value)
    return state

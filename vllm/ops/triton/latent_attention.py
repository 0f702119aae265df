"""Triton implementation of `latent_attention` and `write_latent_`.

A program owns one token's query and some heads, and reads the rows of all tokens that it sees: a row's latent is both
the key and the value. Tiles of rows begin at the sequence's start, so a query's bits depend on its own sequence alone.
The grid depends on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.float8 import KINDS, RAW_FACTOR, as_bytes, narrowed, widened
from vllm.ops.triton.paged_tiles import ANY_ALIGNMENT, LEAST_SHARED_KIB, Tile, shared_kib

_LOG2_E = 1.4426950408889634
# A tile of rows takes at most so many bytes of keys.
_KEYS_BYTES = 32768


def write_latent_(latent: Tensor, rope: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    if not len(latent):
        return
    sizes = {"LATENT_DIM": latent.shape[1], "ROPE_DIM": rope.shape[1], "FLOAT8": KINDS.get(cache.dtype, 0)}
    sizes |= {"LATENT": triton.next_power_of_2(latent.shape[1]), "ROPE": triton.next_power_of_2(rope.shape[1])}
    inputs = latent, latent.stride(0), rope, rope.stride(0)
    _write_kernel[(len(latent),)](*inputs, as_bytes(cache), slot_mapping, scale, **sizes)


# A part of one upload, at another offset each step: do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_kernel(
    latent_ptr,  # [T, LATENT_DIM]
    latent_stride,
    rope_ptr,  # [T, ROPE_DIM]
    rope_stride,
    cache_ptr,  # [slots, LATENT_DIM + ROPE_DIM]
    slot_mapping_ptr,  # int [T]
    scale,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        row_ptr = cache_ptr + slot * (LATENT_DIM + ROPE_DIM)
        dim = tl.arange(0, LATENT)
        x = tl.load(latent_ptr + token * latent_stride + dim, mask=dim < LATENT_DIM)
        tl.store(row_ptr + dim, narrowed(x, scale, FLOAT8), mask=dim < LATENT_DIM)
        dim = tl.arange(0, ROPE)
        x = tl.load(rope_ptr + token * rope_stride + dim, mask=dim < ROPE_DIM)
        tl.store(row_ptr + LATENT_DIM + dim, narrowed(x, scale, FLOAT8), mask=dim < ROPE_DIM)


def fits(q_latent: Tensor) -> bool:
    """Whether a program's sums fit in its registers: on Turing they do not."""
    return shared_kib(q_latent.device) > LEAST_SHARED_KIB


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    cache_scale: float = 1.0,
) -> Tensor:
    tokens, num_heads, latent_dim = q_latent.shape
    out = q_latent.new_empty(q_latent.shape)
    if not tokens or not len(seq_lens):
        return out
    float8 = KINDS.get(cache.dtype, 0)
    latent, rope = (max(16, triton.next_power_of_2(each.shape[2])) for each in (q_latent, q_rope))
    tile = _tile(latent, q_latent.element_size())
    row_scale = cache_scale * RAW_FACTOR[float8]
    _attend_kernel[(tokens, triton.cdiv(num_heads, tile.rows))](
        q_latent,
        *q_latent.stride()[:2],
        q_rope,
        *q_rope.stride()[:2],
        as_bytes(cache),
        block_table,
        block_table.stride(0),
        query_start_loc,
        seq_lens,
        len(seq_lens),
        num_heads,
        scale * row_scale * _LOG2_E,
        row_scale,
        out,
        LATENT_DIM=latent_dim,
        ROPE_DIM=q_rope.shape[2],
        LATENT=latent,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        REQUESTS=triton.next_power_of_2(len(seq_lens)),
        FLOAT8=float8,
        # The interpreter computes with NumPy, which has no bfloat16.
        WIDEN=triton.knobs.runtime.interpret and q_latent.dtype == torch.bfloat16,
        HEADS=tile.rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _tile(latent: int, element_size: int) -> Tile:
    """The fewest heads that a matrix product takes: with the widest latents their sums fill the registers."""
    keys = max(16, min(64, _KEYS_BYTES // (latent * element_size)))
    return Tile(16, keys, 8 if latent > 256 else 4, 1 if element_size == 4 else 2)


@triton.jit(do_not_specialize=["table_stride", "requests"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _attend_kernel(
    q_latent_ptr,  # [T, heads, LATENT_DIM]
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope_ptr,  # [T, heads, ROPE_DIM]
    q_rope_token_stride,
    q_rope_head_stride,
    cache_ptr,  # [blocks, BLOCK_SIZE, LATENT_DIM + ROPE_DIM]
    block_table_ptr,  # int32 [R, table_stride]
    table_stride,
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    requests,
    num_heads,
    scale,  # of the scores, for exponents of 2
    value_scale,
    out_ptr,  # [T, heads, LATENT_DIM]
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0)
    # The last request that begins no later than the token; those without queries come before it.
    every = tl.arange(0, REQUESTS)
    starts = tl.load(query_start_loc_ptr + every, mask=every < requests, other=2147483647)
    request = tl.sum((starts <= token).to(tl.int32), axis=0) - 1
    end = tl.load(query_start_loc_ptr + request + 1)
    if token >= end:
        return
    # The query's position is the last one that it sees.
    tokens = tl.load(seq_lens_ptr + request) - (end - token) + 1
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    latent_dim, rope_dim = tl.arange(0, LATENT), tl.arange(0, ROPE)
    in_latent, in_rope = (latent_dim < LATENT_DIM)[None, :], (rope_dim < ROPE_DIM)[None, :]
    is_head = (head < num_heads)[:, None]
    row = token.to(tl.int64)
    at = q_latent_ptr + row * q_latent_token_stride + head[:, None] * q_latent_head_stride + latent_dim[None, :]
    q_latent = tl.load(at, mask=is_head & in_latent, other=0.0)
    at = q_rope_ptr + row * q_rope_token_stride + head[:, None] * q_rope_head_stride + rope_dim[None, :]
    q_rope = tl.load(at, mask=is_head & in_rope, other=0.0)
    if WIDEN:
        q_latent, q_rope = q_latent.to(tl.float32), q_rope.to(tl.float32)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, LATENT], tl.float32)
    table_row_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    for first in range(0, tokens, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = key < tokens
        block = tl.load(table_row_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        row_ptr = cache_ptr + (block * BLOCK_SIZE + key % BLOCK_SIZE) * (LATENT_DIM + ROPE_DIM)
        latent = tl.load(row_ptr[:, None] + latent_dim[None, :], mask=inside[:, None] & in_latent, other=0)
        rope = tl.load(row_ptr[:, None] + LATENT_DIM + rope_dim[None, :], mask=inside[:, None] & in_rope, other=0)
        latent, rope = widened(latent, FLOAT8, q_latent.dtype), widened(rope, FLOAT8, q_rope.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    at = out_ptr + (row * num_heads + head[:, None]) * LATENT_DIM + latent_dim[None, :]
    out = sums / total[:, None] * value_scale
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_head & in_latent)

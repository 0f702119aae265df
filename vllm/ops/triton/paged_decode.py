"""The decode kernels of `paged_attention`: requests with one query, whose context is split; see paged_attention.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops.triton.paged_tiles import (
    ANY_ALIGNMENT,
    LEAST_SHARED_KIB,
    Inputs,
    Tile,
    attend,
    first_seen,
    of_heads,
    padded,
    shared_kib,
    with_sink,
)

# Contexts are split from this length on: below it the second kernel costs more than it saves.
_SPLIT_TOKENS = 512
# Splits of a long context times key heads: as many programs for one request as the largest devices have processors.
_SPLITS_OF_ALL_HEADS = 128
# Programs of a decode step: several times what a device holds at once, so that the last ones fill it well.
_DECODE_PROGRAMS = 4096
# Splits added up at once.
_MERGED_SPLITS = 8


def decode(inputs: Inputs, max_seq_len: int | None) -> None:
    """Attend for the requests with one query, none of which is longer than `max_seq_len`, if that is known."""
    q, keys = inputs.q, inputs.keys
    num_heads, head_dim = q.shape[1:]
    requests, kv_heads = len(inputs.seq_lens), keys.shape[1]
    dims = padded(head_dim)
    tile = _decode_tile(dims, q.element_size(), num_heads // kv_heads, shared_kib(q.device))
    max_splits = max(8, min(64, _SPLITS_OF_ALL_HEADS // kv_heads))
    longest = inputs.block_table.shape[1] * keys.shape[2]
    if max_seq_len is not None:
        longest = min(longest, max_seq_len)
    if inputs.most_seen is not None:
        longest = min(longest, inputs.most_seen + tile.keys)
    splits = max(1, min(max_splits, triton.cdiv(longest, _SPLIT_TOKENS)))
    programs = min(splits, triton.cdiv(_DECODE_PROGRAMS, requests * kv_heads))
    cells = (requests, splits, num_heads) if splits > 1 else (0, 0, 0)
    sums = torch.empty((*cells, head_dim), dtype=torch.float32, device=q.device)
    highest, total = (torch.empty(cells, dtype=torch.float32, device=q.device) for _ in range(2))
    parts = sums, highest, total, splits
    splitting = {"MAX_SPLITS": max_splits, "SPLIT_TOKENS": _SPLIT_TOKENS, "KEYS": tile.keys}
    launch = {"ROWS": tile.rows, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    _decode_kernel[(kv_heads, requests, programs)](
        *inputs.arguments(), *parts, **inputs.constants(), **splitting, **launch
    )
    if splits > 1:
        sizes = {"HEAD_DIM": head_dim, "DIMS": dims, "ALL_SPLITS": triton.next_power_of_2(max_splits)}
        sizes |= {"WINDOW": inputs.most_seen or 0, "IN_CHUNKS": inputs.chunk is not None, "SPLITS": _MERGED_SPLITS}
        rows = inputs.query_start_loc, inputs.seq_lens, inputs.value_scale, inputs.sinks, inputs.out
        _merge_splits_kernel[(num_heads, requests)](*parts, *rows, **sizes, **splitting)


def _decode_tile(dims: int, element_size: int, group: int, shared: int) -> Tile:
    """Few rows; keys and values of 16 KiB each a tile. Two tiles are loaded ahead, except on Turing, which cannot."""
    rows = max(16, triton.next_power_of_2(group))
    if shared == LEAST_SHARED_KIB:
        return Tile(rows, 32 if dims <= 128 else 16, 4, 1)
    if element_size == 2:
        return Tile(rows, max(16, min(128, 8192 // dims)), 4, 5)
    return Tile(rows, max(16, min(64, 4096 // dims)), 4, 3)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _decode_kernel(
    q_ptr,  # [T, kv_heads * GROUP, D]
    q_token_stride,
    q_head_stride,
    keys_ptr,  # [blocks, kv_heads, BLOCK_SIZE, D]
    keys_block_stride,
    keys_head_stride,
    keys_row_stride,
    keys_dim_stride,
    values_ptr,  # [blocks, kv_heads, BLOCK_SIZE, D]
    values_block_stride,
    values_head_stride,
    values_row_stride,
    block_table_ptr,  # int32 [R, table_stride]
    table_stride,
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    scale,  # of the scores, for exponents of 2
    value_scale,
    alibi_slopes_ptr,  # float32 [kv_heads * GROUP], or None
    sinks_ptr,  # float32 [kv_heads * GROUP], or None
    out_ptr,  # [T, kv_heads * GROUP, D]
    sums_ptr,  # float32 [R, splits, kv_heads * GROUP, D], written for contexts of several splits
    highest_ptr,  # float32 [R, splits, kv_heads * GROUP], likewise
    total_ptr,  # float32 [R, splits, kv_heads * GROUP], likewise
    splits,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    FLOAT8: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0) * GROUP
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    # The first key that is seen, and the tile that it lies in.
    seen = tl.maximum(first_seen(seq_len - 1, WINDOW, IN_CHUNKS), 0) if WINDOW else 0
    begin = seen // KEYS * KEYS
    split_len = _split_len(seq_len - begin, MAX_SPLITS, SPLIT_TOKENS, KEYS)
    num_splits = tl.cdiv(seq_len - begin, split_len)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    last_key = tl.zeros([ROWS], dtype=tl.int32) + (seq_len - 1)
    table_row_ptr = block_table_ptr + request * table_stride
    keys = keys_ptr + kv_head * keys_head_stride, keys_block_stride, keys_row_stride, keys_dim_stride
    values = values_ptr + kv_head * values_head_stride, values_block_stride, values_row_stride
    ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    slopes = of_heads(alibi_slopes_ptr, head, row < GROUP)
    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        first = begin + split * split_len
        end = tl.minimum(seq_len, first + split_len)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        state = highest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)
        # One loop, masked throughout: it waits for memory anyway, and a second one would start with no load in flight.
        highest, total, sums = attend(
            q,
            state,
            first,
            end,
            seen,
            last_key,
            slopes,
            table_row_ptr,
            keys,
            values,
            scale,
            HEAD_DIM,
            BLOCK_SIZE,
            KEYS,
            FLOAT8,
            True,
            WINDOW,
            IN_CHUNKS,
            SOFTCAP,
            ALIBI,
        )
        if num_splits == 1:
            if sinks_ptr is not None:
                factor, total = with_sink(highest, total, sinks_ptr, head, row < GROUP)
                sums *= factor[:, None]
            at = out_ptr + (token * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(at, (sums / total[:, None] * value_scale).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            cell = (request * splits + split) * num_heads + head
            tl.store(sums_ptr + cell[:, None] * HEAD_DIM + dim[None, :], sums, mask=mask)
            tl.store(highest_ptr + cell, highest, mask=row < GROUP)
            tl.store(total_ptr + cell, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=ANY_ALIGNMENT[1:])
def _merge_splits_kernel(
    sums_ptr,  # float32 [R, splits, heads, D]
    highest_ptr,  # float32 [R, splits, heads]
    total_ptr,  # float32 [R, splits, heads]
    splits,
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    value_scale,
    sinks_ptr,  # float32 [heads], or None
    out_ptr,  # [T, heads, D]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    request = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    if WINDOW:
        seq_len -= tl.maximum(first_seen(seq_len - 1, WINDOW, IN_CHUNKS), 0) // KEYS * KEYS
    num_splits = tl.cdiv(seq_len, _split_len(seq_len, MAX_SPLITS, SPLIT_TOKENS, KEYS))
    if num_splits == 1:
        return
    first_cell = request * splits * num_heads + head
    every = tl.arange(0, ALL_SPLITS)
    highest = tl.load(highest_ptr + first_cell + every * num_heads, mask=every < num_splits, other=float("-inf"))
    highest = tl.max(highest, axis=0)
    dim = tl.arange(0, DIMS)
    total = 0.0
    sums = tl.zeros([DIMS], dtype=tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        inside = split < num_splits
        cell = first_cell + split * num_heads
        weights = tl.exp2(tl.load(highest_ptr + cell, mask=inside, other=float("-inf")) - highest)
        total += tl.sum(tl.load(total_ptr + cell, mask=inside, other=0.0) * weights, axis=0)
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(sums_ptr + cell[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        sums += tl.sum(part * weights[:, None], axis=0)
    if sinks_ptr is not None:
        factor, total = with_sink(highest, total, sinks_ptr, head, True)
        sums *= factor
    at = out_ptr + (token * num_heads + head) * HEAD_DIM + dim
    tl.store(at, (sums / total * value_scale).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def _split_len(seq_len, MAX_SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """Tokens of each split of a context, the last one aside: whole tiles, and at most MAX_SPLITS splits."""
    num_splits = tl.minimum(MAX_SPLITS, tl.cdiv(seq_len, SPLIT_TOKENS))
    return tl.cdiv(tl.cdiv(seq_len, num_splits), KEYS) * KEYS

"""Triton twin of `paged_attention`: online softmax over tiles of the paged cache.

Requests with one query are decoded: a program owns one key head of one request, with all the query heads that share
it, and reads one split of the context at a time, or several one after the other where there are more requests than
the device can run at once. What a split comes to is kept in float32, and a second kernel adds the splits up in their
order. How a context is split follows from its own length alone.

Other requests are prefilled: a program owns one key head and a tile of rows: consecutive tokens of one request, each
with all the query heads that share the key head. Which tile it owns follows from its number: request r's tiles start
at query_start_loc[r] // tokens + r, a bound that the grid can be sized by without looking at the lengths on the
device. Long tiles start first.

Both read keys and values once a program. Tiles of a prefill that every row sees in full have no mask; the masked ones
come last.

What holds of a row's bits: shapes depend on the model and the device alone, so they do not depend on the other
requests of the batch. Nor do they depend on where a prompt was cut, but for pieces of one token, which are decoded.

The grids depend on shapes alone: the number of requests, of tokens and of the block table's columns. Programs that
have nothing to do leave at once. Products run in the tensors' dtype (float32 without TF32) and are summed in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634

# Contexts are split from this length on: below it the second kernel costs more than is won.
_SPLIT_TOKENS = 512
# Splits of a long context times key heads: as many programs for one request as the largest devices have processors.
_SPLITS_OF_ALL_HEADS = 128
# Programs of a decode step: several times what a device holds at once, so that the last ones fill it well.
_DECODE_PROGRAMS = 4096
# Splits added up at once.
_MERGED_SPLITS = 8
# Parts of one upload, each step at other places in it: code for each alignment would be compiled while requests wait.
_ANY_ALIGNMENT = ["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"]


class _Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


class _Inputs(NamedTuple):
    """What both kernels take, the strides of the first three aside."""

    q: Tensor
    keys: Tensor
    values: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    out: Tensor

    def arguments(self) -> tuple:
        """In the kernels' order."""
        return (
            self.q,
            *self.q.stride()[:2],
            self.keys,
            *self.keys.stride(),
            self.values,
            *self.values.stride()[:3],
            self.block_table,
            self.block_table.stride(0),
            self.query_start_loc,
            self.seq_lens,
            self.scale * _LOG2_E,
            self.out,
        )

    def constants(self) -> dict[str, int | bool]:
        num_heads, head_dim = self.q.shape[1:]
        return {
            "HEAD_DIM": head_dim,
            "GROUP": num_heads // self.keys.shape[1],
            "BLOCK_SIZE": self.keys.shape[2],
            "DIMS": _padded(head_dim),
            # The interpreter computes with NumPy, which has no bfloat16.
            "WIDEN": triton.knobs.runtime.interpret and self.q.dtype == torch.bfloat16,
        }


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    max_query_len: int | None,
) -> Tensor:
    """Run the kernels. Arguments and result: `vllm.ops.paged_attention.paged_attention`, the caches as `cache_rows`
    views them."""
    if len(q) and len(seq_lens):
        inputs = _Inputs(q, keys, values, block_table, query_start_loc, seq_lens, scale, out)
        _decode(inputs)
        if max_query_len != 1:
            _prefill(inputs)
    return out


def _decode(inputs: _Inputs) -> None:
    q, keys = inputs.q, inputs.keys
    num_heads, head_dim = q.shape[1:]
    requests, kv_heads = len(inputs.seq_lens), keys.shape[1]
    dims = _padded(head_dim)
    tile = _decode_tile(dims, q.element_size(), num_heads // kv_heads)
    max_splits = max(8, min(64, _SPLITS_OF_ALL_HEADS // kv_heads))
    longest = inputs.block_table.shape[1] * keys.shape[2]
    splits = max(1, min(max_splits, triton.cdiv(longest, _SPLIT_TOKENS)))
    programs = min(splits, triton.cdiv(_DECODE_PROGRAMS, requests * kv_heads))
    cells = (requests, splits, num_heads) if splits > 1 else (0, 0, 0)
    sums = torch.empty((*cells, head_dim), dtype=torch.float32, device=q.device)
    highest, total = (torch.empty(cells, dtype=torch.float32, device=q.device) for _ in range(2))
    splitting = {"MAX_SPLITS": max_splits, "SPLIT_TOKENS": _SPLIT_TOKENS, "KEYS": tile.keys}
    _decode_kernel[(kv_heads, requests, programs)](
        *inputs.arguments(),
        sums,
        highest,
        total,
        splits,
        **inputs.constants(),
        **splitting,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge_splits_kernel[(num_heads, requests)](
            sums,
            highest,
            total,
            splits,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.out,
            HEAD_DIM=head_dim,
            DIMS=dims,
            **splitting,
            ALL_SPLITS=triton.next_power_of_2(max_splits),
            SPLITS=_MERGED_SPLITS,
        )


def _prefill(inputs: _Inputs) -> None:
    q, kv_heads, requests = inputs.q, inputs.keys.shape[1], len(inputs.seq_lens)
    group = q.shape[1] // kv_heads
    tile = _prefill_tile(_padded(q.shape[2]), q.element_size(), _shared_kib(q.device))
    rows = max(tile.rows, triton.next_power_of_2(group))
    _prefill_kernel[(kv_heads, len(q) // (rows // group) + requests)](
        *inputs.arguments(),
        requests,
        **inputs.constants(),
        ROWS=rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _decode_tile(dims: int, element_size: int, group: int) -> _Tile:
    """Few rows; keys and values of 16 KiB each a tile, of which two are on their way while one is computed with."""
    rows = max(16, triton.next_power_of_2(group))
    if element_size == 2:
        return _Tile(rows, max(16, min(128, 8192 // dims)), 4, 5)
    return _Tile(rows, max(16, min(64, 4096 // dims)), 4, 3)


def _prefill_tile(dims: int, element_size: int, shared_kib: int) -> _Tile:
    """As many rows as spill no register. float32 is multiplied without tensor cores, which takes more registers."""
    if element_size == 2:
        if dims <= 64:
            return _Tile(128, 64, 8, 3)
        if dims <= 128:
            return _Tile(128, 64, 8, 5 if shared_kib > 160 else 3)
        return _Tile(64, 32, 8, 5 if shared_kib > 160 else 3)
    if dims <= 64:
        return _Tile(32, 16, 4, 2)
    return _Tile(16, 32 if dims <= 128 else 16, 8, 2)


@lru_cache(maxsize=8)
def _shared_kib(device: torch.device) -> int:
    """Shared memory that a program can have."""
    if triton.knobs.runtime.interpret:
        return 99
    capability = triton.runtime.driver.active.get_current_target().arch
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}.get(capability, 99)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
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
    out_ptr,  # [T, kv_heads * GROUP, D]
    sums_ptr,  # float32 [R, splits, kv_heads * GROUP, D], written for contexts of several splits
    highest_ptr,  # float32 [R, splits, kv_heads * GROUP], likewise
    total_ptr,  # float32 [R, splits, kv_heads * GROUP], likewise
    splits,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
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
    split_len = _split_len(seq_len, MAX_SPLITS, SPLIT_TOKENS, KEYS)
    num_splits = tl.cdiv(seq_len, split_len)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    last_key = tl.zeros([ROWS], dtype=tl.int32) + (seq_len - 1)
    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        first = split * split_len
        end = tl.minimum(seq_len, first + split_len)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        sums = tl.zeros([ROWS, DIMS], dtype=tl.float32)
        # One loop, masked throughout: its loads wait for memory anyway, and a second loop would start with none on
        # their way.
        highest, total, sums = _attend(
            q,
            highest,
            total,
            sums,
            first,
            end,
            last_key,
            block_table_ptr + request * table_stride,
            keys_ptr + kv_head * keys_head_stride,
            keys_block_stride,
            keys_row_stride,
            keys_dim_stride,
            values_ptr + kv_head * values_head_stride,
            values_block_stride,
            values_row_stride,
            scale,
            HEAD_DIM,
            BLOCK_SIZE,
            DIMS,
            WIDEN,
            KEYS,
            True,
        )
        if num_splits == 1:
            at = out_ptr + (token * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(at, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            cell = (request * splits + split) * num_heads + head
            tl.store(sums_ptr + cell[:, None] * HEAD_DIM + dim[None, :], sums, mask=mask)
            tl.store(highest_ptr + cell, highest, mask=row < GROUP)
            tl.store(total_ptr + cell, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=_ANY_ALIGNMENT[1:])
def _merge_splits_kernel(
    sums_ptr,  # float32 [R, splits, heads, D]
    highest_ptr,  # float32 [R, splits, heads]
    total_ptr,  # float32 [R, splits, heads]
    splits,
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    out_ptr,  # [T, heads, D]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
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
        part = tl.load(
            sums_ptr + cell[:, None] * HEAD_DIM + dim[None, :],
            mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        sums += tl.sum(part * weights[:, None], axis=0)
    at = out_ptr + (token * num_heads + head) * HEAD_DIM + dim
    tl.store(at, (sums / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "requests"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _prefill_kernel(
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
    out_ptr,  # [T, kv_heads * GROUP, D]
    requests,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = _request_of_tile(tile, query_start_loc_ptr, requests, TOKENS)
    first_token = tl.load(query_start_loc_ptr + request)
    num_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = (tile - (first_token // TOKENS + request)) * TOKENS
    if (num_tokens == 1) | (first_query >= num_tokens):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    # Rows past the last whole token of a tile belong to the next tile.
    mask = ((row < TOKENS * GROUP) & (query < num_tokens))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_token + query).to(tl.int64)
    q = tl.load(q_ptr + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :], mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    last_key = seq_len - num_tokens + query
    whole = (seq_len - num_tokens + first_query + 1) // KEYS * KEYS
    end = tl.minimum(seq_len, seq_len - num_tokens + first_query + TOKENS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    for MASKED in tl.static_range(2):
        highest, total, sums = _attend(
            q,
            highest,
            total,
            sums,
            whole if MASKED else 0,
            end if MASKED else whole,
            last_key,
            block_table_ptr + request.to(tl.int64) * table_stride,
            keys_ptr + kv_head * keys_head_stride,
            keys_block_stride,
            keys_row_stride,
            keys_dim_stride,
            values_ptr + kv_head * values_head_stride,
            values_block_stride,
            values_row_stride,
            scale,
            HEAD_DIM,
            BLOCK_SIZE,
            DIMS,
            WIDEN,
            KEYS,
            MASKED,
        )
    at = out_ptr + ((token * num_heads + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(at, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q,  # [ROWS, DIMS]
    highest,  # float32 [ROWS], of the scaled scores so far
    total,  # float32 [ROWS]
    sums,  # float32 [ROWS, DIMS]
    first,  # key to start at
    end,  # and to stop before
    last_key,  # int32 [ROWS], the last one that a row sees, looked at if MASKED
    table_row_ptr,  # int32 [blocks of the request]
    keys_ptr,  # one head's
    keys_block_stride,
    keys_row_stride,
    keys_dim_stride,
    values_ptr,  # one head's
    values_block_stride,
    values_row_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDEN: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys in [first, end) in. Without a mask every row must see all of them, in whole tiles; with it, every
    row must see one of the first tile or of those before."""
    dim = tl.arange(0, DIMS)
    for first_key in range(first, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(table_row_ptr + key // BLOCK_SIZE, mask=inside if MASKED else None, other=0 if MASKED else None)
        block = block.to(tl.int64)
        offset = key % BLOCK_SIZE
        key_ptrs = (keys_ptr + block * keys_block_stride + offset * keys_row_stride)[:, None]
        value_ptrs = (values_ptr + block * values_block_stride + offset * values_row_stride)[:, None]
        key_ptrs += dim[None, :] * keys_dim_stride
        value_ptrs += dim[None, :]
        if MASKED or DIMS > HEAD_DIM:
            mask = (dim < HEAD_DIM)[None, :]
            if MASKED:
                mask = mask & inside[:, None]
            keys = tl.load(key_ptrs, mask=mask, other=0.0)
            values = tl.load(value_ptrs, mask=mask, other=0.0)
        else:
            keys = tl.load(key_ptrs)
            values = tl.load(value_ptrs)
        if WIDEN:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        shrink = tl.exp2(highest - higher)
        # One rounding whether there is a mask or not: a row's bits do not depend on its place in a tile.
        weights = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, total, sums


@triton.jit
def _split_len(seq_len, MAX_SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """Tokens of each split of a context, the last one aside: whole tiles, and at most MAX_SPLITS splits."""
    num_splits = tl.minimum(MAX_SPLITS, tl.cdiv(seq_len, SPLIT_TOKENS))
    return tl.cdiv(tl.cdiv(seq_len, num_splits), KEYS) * KEYS


@triton.jit
def _request_of_tile(tile, query_start_loc_ptr, requests, TOKENS: tl.constexpr):
    """The last request whose first tile is not after `tile`, by bisection."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low

"""Triton twin of `paged_attention`: online softmax over tiles of the paged cache, read once a program.

A program owns one key head and a tile of query rows: consecutive tokens of one request, each with all
the query heads that share the key head, so grouped heads share the reads. Which tile it owns follows from
its number: request r's tiles start at query_start_loc[r] // tokens + r, a bound the grid can be sized by
without looking at the lengths on the device (programs beyond a request's last tile leave at once).

The tile's shape depends on the model alone, never on the batch, so a row's result does not either. Products
run in the tensors' dtype (float32 without TF32) and are summed in float32. The kernel masks the ends of all
tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Run the kernel. Arguments and result: `vllm.ops.paged_attention.paged_attention`."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    requests = len(seq_lens)
    if not tokens or not requests:
        return out
    group = num_heads // num_kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))
    rows, keys, num_warps = _tile(dims, q.element_size())
    rows = max(rows, triton.next_power_of_2(group))
    _paged_attention_kernel[(tokens // (rows // group) + requests, num_kv_heads)](
        q,
        q.stride(0),
        q.stride(1),
        k_cache,
        v_cache,
        block_table,
        block_table.stride(0),
        query_start_loc,
        seq_lens,
        requests,
        scale * _LOG2_E,
        out,
        head_dim,
        GROUP=group,
        BLOCK_SIZE=k_cache.shape[2] // head_dim,
        ROWS=rows,
        # The interpreter computes with NumPy, which has no bfloat16.
        WIDEN=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        KEYS=keys,
        DIMS=dims,
        num_warps=num_warps,
        num_stages=2,
    )
    return out


def _tile(dims: int, element_size: int) -> tuple[int, int, int]:
    """Query rows, keys and warps: as many as spill no register. float32 is multiplied without tensor cores,
    which takes more registers."""
    if element_size == 2:
        return 32, 64 if dims <= 128 else 32, 4 if dims <= 64 else 8
    if dims <= 64:
        return 32, 16, 4
    return 16, 32 if dims <= 128 else 16, 8


@triton.jit(do_not_specialize=["requests"])
def _paged_attention_kernel(
    q_ptr,  # [T, kv_heads * GROUP, D]
    q_token_stride,
    q_head_stride,
    k_cache_ptr,  # [blocks, kv_heads, D * BLOCK_SIZE]
    v_cache_ptr,  # [blocks, kv_heads, BLOCK_SIZE * D]
    block_table_ptr,  # int32 [R, table_stride]
    table_stride,
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    requests,
    scale,  # of the scores, for exponents of 2
    out_ptr,  # [T, kv_heads * GROUP, D]
    head_dim,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    request = _request_of_tile(tl.program_id(0), query_start_loc_ptr, requests, TOKENS)
    first_token = tl.load(query_start_loc_ptr + request)
    num_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = (tl.program_id(0) - (first_token // TOKENS + request)) * TOKENS
    if first_query >= num_tokens:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIMS)
    # Rows past the last whole token of a tile belong to the next tile.
    mask = ((row < TOKENS * GROUP) & (query < num_tokens))[:, None] & (dim < head_dim)[None, :]
    token = (first_token + query).to(tl.int64)
    q = tl.load(q_ptr + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :], mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    position = seq_len - num_tokens + query
    end = tl.minimum(seq_len, seq_len - num_tokens + first_query + TOKENS)
    table_row_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    for first_key in range(0, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(table_row_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cell = (block * kv_heads + kv_head) * (head_dim * BLOCK_SIZE)
        offset = key % BLOCK_SIZE
        keys = tl.load(
            k_cache_ptr + (cell + offset)[None, :] + dim[:, None] * BLOCK_SIZE,
            mask=inside[None, :] & (dim < head_dim)[:, None],
            other=0.0,
        )
        values = tl.load(
            v_cache_ptr + (cell + offset * head_dim)[:, None] + dim[None, :],
            mask=inside[:, None] & (dim < head_dim)[None, :],
            other=0.0,
        )
        if WIDEN:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        # Key 0 is seen by every row, so no row's maximum stays -inf.
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    attended = sums / total[:, None]
    tl.store(
        out_ptr + ((token * kv_heads * GROUP + head) * head_dim)[:, None] + dim[None, :],
        attended.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


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

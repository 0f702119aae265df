"""Triton implementation of `paged_attention`: online softmax over tiles of the paged cache.

Requests with one query are decoded: a program owns one key head of one request, with all the query heads that share it,
and reads one split of the context, or several in turn where there are more requests than the device can run at once. A
split's partial result is kept in float32, and a second kernel adds the splits up in their order. How a context is split
follows from its own length alone.

Other requests are prefilled: a program owns one key head and a tile of rows: consecutive tokens of one request, each
with all the query heads that share the key head. Request r's tiles start at number query_start_loc[r] // tokens + r,
which bounds the grid without reading lengths on the device. Long tiles start first. Tiles that every row sees in full
have no mask; the masked ones come last.

Tile shapes depend on the model and the device alone, so a row's bits depend neither on the other requests of the batch
nor on where a prompt was cut, except for pieces of one token, which are decoded. Grids depend on shapes alone; programs
without work return at once. Products run in the tensors' dtype (float32 without TF32) and are summed in float32.

With a window, tiles that no row sees are skipped, and of the blocks before the first key that one sees neither table
entries nor contents are read: they may belong to other requests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm import envs
from vllm.ops.kv_cache import cache_rows
from vllm.ops.triton.paged_decode import decode
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


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    num_decodes: int | None,
    max_decode_len: int | None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    if len(q) and len(seq_lens):
        keys, values = cache_rows(k_cache, v_cache, q.shape[-1])
        requests = block_table, query_start_loc, seq_lens
        inputs = Inputs(q, keys, values, *requests, scale, out, window, softcap, alibi_slopes, sinks, k_scale, v_scale)
        inputs = inputs._replace(chunk=chunk)
        if envs.batch_invariant():
            # A position's bits are the same as a prompt's and as an output's.
            _prefill(inputs, 0, takes_all=True)
            return out
        if num_decodes != 0:
            decode(inputs.of_rows(0, num_decodes), max_decode_len)
        first = num_decodes or 0
        if first < len(seq_lens):
            _prefill(inputs.of_rows(first), first)
    return out


def _prefill(inputs: Inputs, first_token: int, takes_all: bool = False) -> None:
    """Attend for the requests with several queries, or for all, of which the first is query `first_token`."""
    q, kv_heads, requests = inputs.q, inputs.keys.shape[1], len(inputs.seq_lens)
    group = q.shape[1] // kv_heads
    tile = _prefill_tile(padded(q.shape[2]), q.element_size(), shared_kib(q.device))
    if inputs.most_seen or inputs.softcap or inputs.alibi_slopes is not None:
        # Changes of scores take registers.
        tile = tile._replace(rows=max(tile.rows // 2, 16), keys=max(tile.keys // 2, 16))
    rows = max(tile.rows, triton.next_power_of_2(group))
    launch = {
        "ROWS": rows,
        "KEYS": tile.keys,
        "TAKES_ALL": takes_all,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    tokens = rows // group
    grid = kv_heads, len(q) // tokens - first_token // tokens + requests
    _prefill_kernel[grid](*inputs.arguments(), requests, **inputs.constants(), **launch)


def _prefill_tile(dims: int, element_size: int, shared: int) -> Tile:
    """As many rows as spill no register and fit shared memory (`shared` KiB). float32, and on Turing every dtype, is
    multiplied without tensor cores, which takes more registers."""
    if shared == LEAST_SHARED_KIB:
        return Tile(64, 32, 8, 1) if dims <= 64 else Tile(32 if dims <= 128 else 16, 16, 4, 1)
    if element_size == 2:
        if dims <= 64:
            return Tile(128, 64, 8, 3)
        if dims <= 128:
            return Tile(128, 64, 8, 5 if shared > 160 else 3)
        return Tile(64, 32, 8, 5 if shared > 160 else 3)
    if dims <= 64:
        return Tile(32, 16, 4, 2)
    return Tile(16, 32 if dims <= 128 else 16, 8, 2)


@triton.jit(do_not_specialize=["table_stride", "requests"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
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
    value_scale,
    alibi_slopes_ptr,  # float32 [kv_heads * GROUP], or None
    sinks_ptr,  # float32 [kv_heads * GROUP], or None
    out_ptr,  # [T, kv_heads * GROUP, D]
    requests,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    FLOAT8: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TAKES_ALL: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    # The first request need not begin at the first token.
    tile = tl.num_programs(1) - 1 - tl.program_id(1) + tl.load(query_start_loc_ptr) // TOKENS
    request = _request_of_tile(tile, query_start_loc_ptr, requests, TOKENS)
    first_token = tl.load(query_start_loc_ptr + request)
    num_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = (tile - (first_token // TOKENS + request)) * TOKENS
    if first_query >= num_tokens:
        return
    if not TAKES_ALL and num_tokens == 1:
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
    table_row_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    keys = keys_ptr + kv_head * keys_head_stride, keys_block_stride, keys_row_stride, keys_dim_stride
    values = values_ptr + kv_head * values_head_stride, values_block_stride, values_row_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    state = highest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)
    ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    slopes = of_heads(alibi_slopes_ptr, head, row < TOKENS * GROUP)
    seen = 0
    # With a window every tile is masked.
    FIRST_LOOP: tl.constexpr = 1 if WINDOW else 0
    if WINDOW:
        seen = tl.maximum(first_seen(seq_len - num_tokens + first_query, WINDOW, IN_CHUNKS), 0)
        whole = seen // KEYS * KEYS
    for MASKED in tl.static_range(FIRST_LOOP, 2):
        first = whole if MASKED else 0
        stop = end if MASKED else whole
        state = attend(
            q,
            state,
            first,
            stop,
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
            MASKED,
            WINDOW,
            IN_CHUNKS,
            SOFTCAP,
            ALIBI,
        )
    highest, total, sums = state
    if sinks_ptr is not None:
        factor, total = with_sink(highest, total, sinks_ptr, head, row < TOKENS * GROUP)
        sums *= factor[:, None]
    at = out_ptr + ((token * num_heads + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(at, (sums / total[:, None] * value_scale).to(out_ptr.dtype.element_ty), mask=mask)


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

"""Inputs and the loop over the keys, which the decode and prefill kernels of `paged_attention` share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.float8 import KINDS, RAW_FACTOR, as_bytes, widened

LEAST_SHARED_KIB = 64
"""Turing's, the oldest generation that runs."""

_LOG2_E = 1.4426950408889634
# Parts of one upload, at other offsets each step: code for each alignment would be compiled while requests wait.
ANY_ALIGNMENT = ["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"]


class Tile(NamedTuple):
    """Rows and keys that a program multiplies at once, and how it is launched."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=8)
def shared_kib(device: torch.device) -> int:
    """Shared memory that a program may use."""
    if triton.knobs.runtime.interpret:
        return 99
    capability = triton.runtime.driver.active.get_current_target().arch
    by_capability = {75: LEAST_SHARED_KIB, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
    return by_capability.get(capability, 99)


class Inputs(NamedTuple):
    """The arguments that both kernels take, beside the strides of the first three."""

    q: Tensor
    keys: Tensor
    values: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    out: Tensor
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    chunk: int | None = None

    @property
    def most_seen(self) -> int | None:
        """Keys that a query sees at most; None: all before it."""
        return self.window if self.chunk is None else self.chunk

    @property
    def float8(self) -> int:
        """FLOAT8 of the kernels."""
        return KINDS.get(self.keys.dtype, 0)

    @property
    def value_scale(self) -> float:
        """The scale of values, as the kernels read it."""
        return self.v_scale * RAW_FACTOR[self.float8]

    def of_rows(self, first: int, last: int | None = None) -> Inputs:
        """The inputs of requests [first, last)."""
        starts = self.query_start_loc[first : None if last is None else last + 1]
        tables, lengths = self.block_table[first:last], self.seq_lens[first:last]
        return self._replace(block_table=tables, seq_lens=lengths, query_start_loc=starts)

    def arguments(self) -> tuple:
        """The arguments in the kernels' order."""
        keys, values = as_bytes(self.keys), as_bytes(self.values)
        caches = keys, *keys.stride(), values, *values.stride()[:3]
        scales = self.scale * self.k_scale * RAW_FACTOR[self.float8] * _LOG2_E, self.value_scale
        requests = self.block_table, self.block_table.stride(0), self.query_start_loc, self.seq_lens
        of_heads = self.alibi_slopes, self.sinks
        return self.q, *self.q.stride()[:2], *caches, *requests, *scales, *of_heads, self.out

    def constants(self) -> dict[str, int | bool | float]:
        """By the kernels' names."""
        num_heads, head_dim = self.q.shape[1:]
        return {
            "HEAD_DIM": head_dim,
            "GROUP": num_heads // self.keys.shape[1],
            "BLOCK_SIZE": self.keys.shape[2],
            "DIMS": padded(head_dim),
            "FLOAT8": self.float8,
            "WINDOW": self.most_seen or 0,
            "IN_CHUNKS": self.chunk is not None,
            "SOFTCAP": (self.softcap or 0.0) * _LOG2_E,
            # The interpreter computes with NumPy, which has no bfloat16.
            "WIDEN": triton.knobs.runtime.interpret and self.q.dtype == torch.bfloat16,
        }


def padded(head_dim: int) -> int:
    """A head's width in a product."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def attend(
    q,  # [ROWS, DIMS]
    state,  # float32: maximum of the scaled scores so far [ROWS], total [ROWS], sums [ROWS, DIMS]
    first,  # key to start at
    end,  # and to stop before
    seen,  # first key that any row sees, read with a window
    last_key,  # int32 [ROWS], the last one that a row sees: its own; read if MASKED, and with slopes
    slopes,  # float32 [ROWS], read if ALIBI
    table_row_ptr,  # int32 [blocks of the request]
    keys,  # one head's pointer, and the strides of blocks, rows and dimensions
    values,  # likewise, without that of dimensions
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    FLOAT8: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none; else MASKED
    IN_CHUNKS: tl.constexpr,  # see first_seen
    SOFTCAP: tl.constexpr,  # for exponents of 2; 0.0: none
    ALIBI: tl.constexpr,
):
    """The state with the keys in [first, end) added. Without a mask every row must see all of them, in whole tiles;
    with it, every row must see one of the first tile or of those before, unless there is a window."""
    DIMS: tl.constexpr = q.shape[1]
    dim = tl.arange(0, DIMS)
    highest, total, sums = state
    keys_ptr, keys_block_stride, keys_row_stride, keys_dim_stride = keys
    values_ptr, values_block_stride, values_row_stride = values
    for first_key in range(first, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        inside = key < end
        if WINDOW:
            # The blocks before may belong to others by now.
            inside &= key >= seen
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
            k = tl.load(key_ptrs, mask=mask, other=0)
            v = tl.load(value_ptrs, mask=mask, other=0)
        else:
            k = tl.load(key_ptrs)
            v = tl.load(value_ptrs)
        k = widened(k, FLOAT8, q.dtype)
        v = widened(v, FLOAT8, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale
        if (SOFTCAP > 0) or ALIBI:
            scores = adjusted(scores * scale, key[None, :] - last_key[:, None], slopes, SOFTCAP, ALIBI)
            factor = 1.0
        if MASKED:
            visible = key[None, :] <= last_key[:, None]
            if WINDOW:
                visible &= key[None, :] >= first_seen(last_key, WINDOW, IN_CHUNKS)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        if WINDOW:
            # A row that has seen nothing yet has no maximum to subtract.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        shrink = tl.exp2(highest - base)
        # One rounding whether there is a mask or not: a row's bits do not depend on its place in a tile.
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, total, sums


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, IN_CHUNKS: tl.constexpr):
    """The first key that queries at these positions see with a window, or from the last multiple of it on; of a window
    it may be below 0."""
    return position // WINDOW * WINDOW if IN_CHUNKS else position - (WINDOW - 1)


@triton.jit
def adjusted(scores, distance, slopes, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores for exponents of 2 [ROWS, KEYS] with soft-cap and ALiBi; `distance` is the key's position minus the
    query's."""
    if SOFTCAP > 0:
        # tanh, by an exponential that does not overflow.
        shrunk = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / SOFTCAP))
        bounded = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0.0, -bounded, bounded)
    if ALIBI:
        scores += slopes[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def of_heads(values_ptr, head, mask):
    """A value a query head, for exponents of 2; 0 where there are none."""
    if values_ptr is None:
        return head * 0.0
    else:
        return tl.load(values_ptr + head, mask=mask, other=0.0) * 1.4426950408889634


@triton.jit
def with_sink(highest, total, sinks_ptr, head, mask):
    """The factor of the weighted values and the total that they are divided by, with the sinks of the heads."""
    if sinks_ptr is None:
        return 1.0 + highest * 0.0, total
    else:
        sink = tl.load(sinks_ptr + head, mask=mask, other=0.0) * 1.4426950408889634
        top = tl.maximum(highest, sink)
        factor = tl.exp2(highest - top)
        return factor, total * factor + tl.exp2(sink - top)

"""Triton twin of `token_readings`: the logits are read from memory once.

A row is cut into chunks of _BLOCK logits and a program keeps one chunk in registers, so even one row fills
the device. First the program gathers the row's requested logits (a handful of scattered reads, from the L2
cache for all chunks but one). With the thresholds known in advance, the one read of the chunk yields its
maximum, sum of exponentials, argmax, if asked the sum that the entropy takes, and, for each requested logit, how
many are greater. A second kernel merges the chunks' results in a fixed order: no atomics, so equal inputs give
equal bits.

The kernels mask: the last chunk's tail counts as -inf, and padding columns as +inf, which nothing exceeds.
The wrapper must not look at a value on the device: that would wait for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
# Thresholds compared at once: their counts share the barriers of one reduction.
_GROUP = 8
# Above this many columns one sort of the row is cheaper than a comparison of the row with each column.
_SORT_ABOVE = 256
_MERGED_COLUMNS = 32
_MERGED_CHUNKS = 32

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def token_readings(
    logits: torch.Tensor, token_ids: torch.Tensor, num_token_ids: torch.Tensor | None, entropy: bool
) -> Result:
    """Run the kernels. Arguments and the order of the results: `vllm.ops.token_readings`."""
    num_rows, num_columns = token_ids.shape
    if num_columns <= _SORT_ABOVE:
        return _launch(logits, token_ids, num_token_ids, entropy)
    no_ids = token_ids.new_empty(num_rows, 0)
    _, _, lse, argmax, highest, row_entropy = _launch(logits, no_ids, None, entropy)
    ids = token_ids.to(torch.int64)
    valid = None
    if num_token_ids is not None:
        valid = torch.arange(num_columns, device=ids.device) < num_token_ids[:, None]
        ids.masked_fill_(~valid, 0)
    chosen = logits.gather(1, ids)
    ascending = logits.sort(dim=-1).values
    not_greater = torch.searchsorted(ascending, chosen, right=True)
    ranks = (1 + logits.shape[1] - not_greater).to(torch.int32)
    chosen = chosen.float()
    if valid is not None:
        ranks.masked_fill_(~valid, 0)
        chosen.masked_fill_(~valid, 0.0)
    return chosen, ranks, lse, argmax, highest, row_entropy


def _launch(
    logits: torch.Tensor, token_ids: torch.Tensor, num_token_ids: torch.Tensor | None, with_entropy: bool
) -> Result:
    num_rows, num_columns = token_ids.shape
    vocab_size = logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, _BLOCK)
    device = logits.device

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chosen = empty(torch.float32, num_rows, num_columns)
    ranks = empty(torch.int32, num_rows, num_columns)
    lse, highest = empty(torch.float32, num_rows), empty(torch.float32, num_rows)
    argmax = empty(torch.int32, num_rows)
    entropy = empty(torch.float32, num_rows) if with_entropy else None
    result = chosen, ranks, lse, argmax, highest, entropy
    if not num_rows:
        return result
    chunk_max = empty(torch.float32, num_rows, num_chunks)
    chunk_sum = empty(torch.float32, num_rows, num_chunks)
    chunk_weighted = empty(torch.float32, num_rows, num_chunks) if with_entropy else chunk_sum
    chunk_argmax = empty(torch.int32, num_rows, num_chunks)
    chunk_counts = empty(torch.int32, num_rows, num_chunks, num_columns)
    has_counts = num_token_ids is not None
    counts = num_token_ids if has_counts else argmax
    _token_readings_kernel[(num_rows, num_chunks)](
        logits,
        logits.stride(0),
        vocab_size,
        token_ids,
        token_ids.stride(0),
        num_columns,
        counts,
        chunk_max,
        chunk_sum,
        chunk_weighted,
        chunk_argmax,
        chunk_counts,
        HAS_COUNTS=has_counts,
        HAS_ENTROPY=with_entropy,
        BLOCK=_BLOCK,
        GROUP=_GROUP,
    )
    _merge_kernel[(num_rows, max(1, triton.cdiv(num_columns, _MERGED_COLUMNS)))](
        logits,
        logits.stride(0),
        token_ids,
        token_ids.stride(0),
        num_columns,
        counts,
        chunk_max,
        chunk_sum,
        chunk_weighted,
        chunk_argmax,
        chunk_counts,
        num_chunks,
        vocab_size,
        chosen,
        ranks,
        lse,
        argmax,
        highest,
        lse if entropy is None else entropy,
        HAS_COUNTS=has_counts,
        HAS_ENTROPY=with_entropy,
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNKS=_MERGED_CHUNKS,
        COLUMNS=_MERGED_COLUMNS,
    )
    return result


@triton.jit
def _token_readings_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    vocab_size,
    token_ids_ptr,  # int32 [R, W]
    token_ids_stride,
    num_columns,
    num_token_ids_ptr,  # int32 [R], looked at if HAS_COUNTS
    chunk_max_ptr,  # float32 [R, chunks]
    chunk_sum_ptr,  # float32 [R, chunks]
    chunk_weighted_ptr,  # float32 [R, chunks], written if HAS_ENTROPY
    chunk_argmax_ptr,  # int32 [R, chunks]
    chunk_counts_ptr,  # int32 [R, chunks, W]
    HAS_COUNTS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    cell = row * tl.num_programs(1) + chunk
    row_ptr = logits_ptr + row * logits_stride
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)

    highest = tl.max(x, axis=0)
    # An infinite maximum must not be subtracted from itself: -inf alone sums to 0, +inf to +inf.
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    tl.store(chunk_max_ptr + cell, highest)
    shifted = x - base
    weights = tl.exp(shifted)
    tl.store(chunk_sum_ptr + cell, tl.sum(weights, axis=0))
    if HAS_ENTROPY:
        # Of -inf it makes a number whose exponential is 0 too: 0 times -inf would be NaN.
        tl.store(chunk_weighted_ptr + cell, tl.sum(tl.maximum(shifted, -200.0) * weights, axis=0))
    # A NaN equals nothing; the merging kernel clamps.
    tl.store(chunk_argmax_ptr + cell, tl.min(tl.where(x == highest, column, vocab_size), axis=0))

    num_valid = num_columns
    if HAS_COUNTS:
        num_valid = tl.load(num_token_ids_ptr + row)
    for first in range(0, num_valid, GROUP):
        wanted = first + tl.arange(0, GROUP)
        valid = wanted < num_valid
        ids = tl.load(token_ids_ptr + row * token_ids_stride + wanted, mask=valid, other=0)
        threshold = tl.load(row_ptr + ids, mask=valid, other=float("inf")).to(tl.float32)
        greater = tl.zeros([GROUP], dtype=tl.int32)
        # In most chunks of a peaked row nothing exceeds the chosen logits.
        if highest > tl.min(threshold, axis=0):
            greater = tl.sum((x[None, :] > threshold[:, None]).to(tl.int32), axis=1)
        tl.store(chunk_counts_ptr + cell * num_columns + wanted, greater, mask=valid)


@triton.jit
def _merge_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    token_ids_ptr,  # int32 [R, W]
    token_ids_stride,
    num_columns,
    num_token_ids_ptr,  # int32 [R], looked at if HAS_COUNTS
    chunk_max_ptr,  # float32 [R, chunks]
    chunk_sum_ptr,  # float32 [R, chunks]
    chunk_weighted_ptr,  # float32 [R, chunks], looked at if HAS_ENTROPY
    chunk_argmax_ptr,  # int32 [R, chunks]
    chunk_counts_ptr,  # int32 [R, chunks, W]
    num_chunks,
    vocab_size,
    chosen_ptr,  # float32 [R, W]
    ranks_ptr,  # int32 [R, W]
    lse_ptr,  # float32 [R]
    argmax_ptr,  # int32 [R]
    max_ptr,  # float32 [R]
    entropy_ptr,  # float32 [R], written if HAS_ENTROPY
    HAS_COUNTS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_cell = row * num_chunks
    if tl.program_id(1) == 0:
        chunk = tl.arange(0, ALL_CHUNKS)
        inside = chunk < num_chunks
        maxima = tl.load(chunk_max_ptr + first_cell + chunk, mask=inside, other=float("-inf"))
        sums = tl.load(chunk_sum_ptr + first_cell + chunk, mask=inside, other=0.0)
        argmaxima = tl.load(chunk_argmax_ptr + first_cell + chunk, mask=inside, other=vocab_size)
        highest = tl.max(maxima, axis=0)
        base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
        shifts = maxima - base
        scales = tl.exp(shifts)
        total = tl.sum(sums * scales, axis=0)
        tl.store(max_ptr + row, highest)
        log_total = tl.log(total)
        tl.store(lse_ptr + row, log_total + base)
        if HAS_ENTROPY:
            weighted = tl.load(chunk_weighted_ptr + first_cell + chunk, mask=inside, other=0.0)
            mean = tl.sum((weighted + tl.maximum(shifts, -200.0) * sums) * scales, axis=0) / total
            entropy = log_total - mean
            # Not tl.maximum, which drops NaN.
            tl.store(entropy_ptr + row, tl.where(entropy < 0.0, 0.0, entropy))
        lowest_id = tl.min(tl.where(maxima == highest, argmaxima, vocab_size), axis=0)
        tl.store(argmax_ptr + row, tl.minimum(lowest_id, vocab_size - 1))

    wanted = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = wanted < num_columns
    valid = inside
    if HAS_COUNTS:
        valid = inside & (wanted < tl.load(num_token_ids_ptr + row))
    ids = tl.load(token_ids_ptr + row * token_ids_stride + wanted, mask=valid, other=0)
    chosen = tl.load(logits_ptr + row * logits_stride + ids, mask=valid, other=0.0).to(tl.float32)
    tl.store(chosen_ptr + row * num_columns + wanted, chosen, mask=inside)
    ranks = valid.to(tl.int32)
    for first_chunk in range(0, num_chunks, CHUNKS):
        chunk = first_chunk + tl.arange(0, CHUNKS)
        ranks += tl.sum(
            tl.load(
                chunk_counts_ptr + (first_cell + chunk[:, None]) * num_columns + wanted[None, :],
                mask=(chunk < num_chunks)[:, None] & valid[None, :],
                other=0,
            ),
            axis=0,
        )
    tl.store(ranks_ptr + row * num_columns + wanted, ranks, mask=inside)

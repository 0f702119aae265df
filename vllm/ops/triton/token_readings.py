"""Triton implementation of `token_readings`: one launch, and the logits are read from memory once.

A row is cut into chunks of _CHUNK logits, so that even one row fills the device. A program is one warp, which needs no
barriers. It first gathers the row's requested logits (a few scattered reads, from the L2 cache for all chunks but one).
Then it takes its chunk tile by tile, loading one ahead, and adds up maximum, sum of exponentials, argmax, the sum for
the entropy if requested, and, for each requested logit, how many are greater.

Comparing every logit with every requested one would take longer than reading the logits. So a tile is compared only
with those that are below its maximum, the lowest first. And a lane holds runs of 4 or 8 logits: once a requested logit
is so high that no run holds two that are greater, the higher ones are compared with the runs' maxima alone.

The program of a row that finishes last, by an atomic counter that it resets, merges the chunks' results in the order of
the chunks: equal inputs give equal bits. The last chunk's tail counts as -inf, and padding columns as +inf. The wrapper
must not read a value on the device: that would wait for it.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.count_above import count_above_reference

_CHUNK = 4096
# Logits in a warp's registers, beside as many that are being loaded.
_TILE = 1024
# A lane loads so many contiguous logits at once.
_RUN_BYTES = 16
# Above this many columns one sort of the row, which is what count_above_reference then does, is cheaper.
_SORT_ABOVE = 256
# Widths that a kernel is compiled for.
_WIDTHS = (0, 32, _SORT_ABOVE)
# A lane's counts that are merged at once.
_MERGED = 32
# With these, 16 warps share a multiprocessor. Less common requests, and rows that are loaded one logit at a time, need
# more not to spill.
_REGISTERS = 128
_MANY_REGISTERS = 224

Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def token_readings(
    logits: Tensor, token_ids: Tensor, num_token_ids: Tensor | None, entropy: bool, ranked: bool = True
) -> Result:
    num_rows, num_columns = token_ids.shape
    if num_columns <= _SORT_ABOVE and ranked:
        return _launch(logits, token_ids, num_token_ids, entropy)
    no_ids = token_ids.new_empty(num_rows, 0)
    _, _, lse, argmax, highest, row_entropy = _launch(logits, no_ids, None, entropy)
    ids = token_ids.to(torch.int64)
    valid = None
    if num_token_ids is not None:
        valid = torch.arange(num_columns, device=ids.device) < num_token_ids[:, None]
        ids.masked_fill_(~valid, 0)
    chosen = logits.gather(1, ids)
    ranks = 1 + count_above_reference(logits, chosen) if ranked else torch.zeros_like(token_ids)
    chosen = chosen.float()
    if valid is not None:
        ranks.masked_fill_(~valid, 0)
        chosen.masked_fill_(~valid, 0.0)
    return chosen, ranks, lse, argmax, highest, row_entropy


# Compare 4 numbers with 4 values, as pairs: all bits of a half are 1 where it is greater; both pairs' sum, then zeros.
_COMPARE_PAIRS = """{{
    .reg .b32 first, second;
    set.gt.u32.{pair} first, $4, $6;
    set.gt.u32.{pair} second, $5, $7;
    add.u32 $0, first, second;
    mov.u32 $1, 0;
    mov.u32 $2, 0;
    mov.u32 $3, 0;
}}"""
_PAIRS = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}


def _compare_pairs(dtype: torch.dtype) -> str:
    """How two numbers are compared in one instruction, in a quarter of the time; empty where none does."""
    if dtype not in _PAIRS or triton.knobs.runtime.interpret:
        return ""
    has_pairs = triton.runtime.driver.active.get_current_target().arch >= 90
    return _COMPARE_PAIRS.format(pair=_PAIRS[dtype]) if has_pairs else ""


def _launch(logits: Tensor, token_ids: Tensor, num_token_ids: Tensor | None, with_entropy: bool) -> Result:
    num_rows, num_columns = token_ids.shape
    vocab_size = logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    device = logits.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chosen = empty(torch.float32, num_rows, num_columns)
    ranks = empty(torch.int32, num_rows, num_columns)
    # lse, maximum and entropy.
    statistics = empty(torch.float32, 3 if with_entropy else 2, num_rows)
    argmax = empty(torch.int32, num_rows)
    result = chosen, ranks, statistics[0], argmax, statistics[1], statistics[2] if with_entropy else None
    if not num_rows:
        return result
    # Each chunk has its maximum, sum and weighted sum (float32), argmax and the columns' counts (int32).
    parts = empty(torch.int32, num_rows, num_chunks, 4 + num_columns)
    width = next(width for width in _WIDTHS if width >= num_columns)
    is_aligned = logits.stride(0) * logits.element_size() % 16 == 0
    rows = logits, logits.stride(0), vocab_size
    counts = argmax if num_token_ids is None else num_token_ids
    ids = token_ids, token_ids.stride(0), num_columns, counts, int(num_token_ids is not None)
    chunks = parts, _arrivals(num_rows, device), num_chunks
    outputs = chosen, ranks, statistics, argmax
    reads = dict(HAS_ENTROPY=with_entropy, WIDTH=width)
    sizes = dict(CHUNK=_CHUNK, TILE=_TILE, RUN=_RUN_BYTES // logits.element_size())
    merge = dict(ALL_CHUNKS=triton.next_power_of_2(num_chunks), MERGED_CHUNKS=32 * _MERGED // max(32, width))
    registers = _REGISTERS if is_aligned and width <= 32 and not with_entropy else _MANY_REGISTERS
    launch = dict(COMPARE_PAIRS=_compare_pairs(logits.dtype), num_warps=1, maxnreg=registers)
    _token_readings_kernel[(num_rows * num_chunks,)](
        *rows, *ids, *chunks, *outputs, **reads, **sizes, **merge, **launch
    )
    return result


# Counters of finished programs, 0 between launches. Calls take regions in turn, so that launches which run at one time,
# on several streams, do not share counters.
_REGION_ROWS = 4096
_NUM_REGIONS = 256
_counters: dict[torch.device, Tensor] = {}
_calls = itertools.count()


def _arrivals(num_rows: int, device: torch.device) -> Tensor:
    """int32 [at least num_rows], zeros; the kernel leaves zeros."""
    counters = _counters.get(device)
    if counters is None or num_rows > _REGION_ROWS:
        fresh = torch.zeros(max(num_rows, _NUM_REGIONS * _REGION_ROWS), dtype=torch.int32, device=device)
        # Memory allocated while a CUDA graph is captured belongs to the graph.
        is_kept = counters is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        return _counters.setdefault(device, fresh) if is_kept else fresh
    start = next(_calls) % _NUM_REGIONS * _REGION_ROWS
    return counters[start : start + num_rows]


# The ids may be columns of a wider table, and what is requested differs from step to step.
@triton.jit(
    do_not_specialize=["token_ids_stride", "num_columns", "has_counts"],
    do_not_specialize_on_alignment=["token_ids_ptr", "num_token_ids_ptr"],
)
def _token_readings_kernel(
    logits_ptr,  # [R, V]
    logits_stride,
    vocab_size,
    token_ids_ptr,  # int32 [R, W]
    token_ids_stride,
    num_columns,
    num_token_ids_ptr,  # int32 [R], read if has_counts
    has_counts,
    parts_ptr,  # int32 [R, chunks, 4 + W]
    arrivals_ptr,  # int32 [R], zeros
    num_chunks,
    chosen_ptr,  # float32 [R, W]
    ranks_ptr,  # int32 [R, W]
    statistics_ptr,  # float32 [2, R]: lse, maximum; [3, R] with the entropy if HAS_ENTROPY
    argmax_ptr,  # int32 [R]
    HAS_ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    MERGED_CHUNKS: tl.constexpr,
    COMPARE_PAIRS: tl.constexpr,
):
    NONE_LEFT: tl.constexpr = 2147483647
    LOG2_E: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    row = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    row_ptr = logits_ptr + row * logits_stride
    first = chunk * CHUNK
    run = tl.arange(0, TILE // RUN)
    place_in_run = tl.arange(0, RUN)
    place_in_tile = run[:, None] * RUN + place_in_run[None, :]
    coming = tl.load(row_ptr + first + place_in_tile, mask=first + place_in_tile < vocab_size, other=float("-inf"))

    if WIDTH > 0:
        num_valid = tl.load(num_token_ids_ptr + row, mask=has_counts > 0, other=num_columns)
        place = tl.arange(0, WIDTH)
        valid = place < tl.minimum(num_valid, num_columns)
        ids = tl.load(token_ids_ptr + row * token_ids_stride + place, mask=valid, other=0)
        wanted = tl.load(row_ptr + ids, mask=valid, other=float("inf")).to(tl.float32)
        # As integers of the same order: negative floats grow downwards.
        bits = wanted.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        counts = tl.zeros([WIDTH], dtype=tl.int32)

    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    argmax = first
    num_tiles = (tl.minimum(vocab_size - first, CHUNK) + TILE - 1) // TILE
    end = first + num_tiles * TILE
    for tile in range(num_tiles):
        raw = coming
        x = raw.to(tl.float32)
        start = first + tile * TILE
        following = start + TILE + place_in_tile
        # Two comparisons, so that the compiler sees that all of a run's logits exist or none does.
        is_there = (following < vocab_size) & (following < end)
        coming = tl.load(row_ptr + following, mask=is_there, other=float("-inf"))
        runs = tl.max(x, axis=1)
        highest = tl.max(runs, axis=0)
        if highest > peak:
            first_run = tl.min(tl.where(runs == highest, run, TILE // RUN), axis=0)
            is_first = (x == highest) & (run == first_run)[:, None]
            argmax = start + first_run * RUN + tl.min(tl.where(is_first, place_in_run[None, :], RUN))
        before = peak
        peak = tl.maximum(peak, highest)
        # An infinite maximum must not be subtracted from itself: -inf alone sums to 0, +inf to +inf.
        base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        # exp2 flushes subnormal numbers to 0, in a third of exp's instructions.
        scale = tl.exp2((before - base) * LOG2_E)
        shifted = x - base
        weights = tl.exp2(shifted * LOG2_E)
        if HAS_ENTROPY:
            # -inf becomes a number whose exponential is 0 too: 0 times -inf would be NaN.
            weighted = (weighted + tl.maximum(before - base, -200.0) * total) * scale
            weighted += tl.sum(tl.maximum(shifted, -200.0) * weights)
        total = total * scale + tl.sum(weights)

        if WIDTH > 0:
            left = tl.where(wanted < highest, ordered, NONE_LEFT)
            lowest = tl.min(left, axis=0)
            num_hidden = 1
            while (lowest < NONE_LEFT) & (num_hidden > 0):
                value = (lowest ^ ((lowest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                if COMPARE_PAIRS == "":
                    # Float32 sums, exact here, take the comparison's result as it comes.
                    above = tl.sum((x > value).to(tl.float32)).to(tl.int32)
                else:
                    # All bits of a half are 1 where it is greater, so the sum is 65535 times that many low halves, and
                    # -65536 times that many high ones.
                    pairs = tl.inline_asm_elementwise(
                        COMPARE_PAIRS, "=r,=r,=r,=r,r,r,r,r", [raw, value.to(raw.dtype)], tl.int32, True, 4
                    )
                    total_pairs = tl.sum(pairs)
                    low = -total_pairs & 0xFFFF
                    above = 2 * low - ((total_pairs + low) >> 16)
                if above <= TILE // RUN:
                    num_hidden = above - tl.sum((runs > value).to(tl.int32), axis=0)
                counts += tl.where(left == lowest, above, 0)
                left = tl.where(left == lowest, NONE_LEFT, left)
                lowest = tl.min(left, axis=0)
            while lowest < NONE_LEFT:
                value = (lowest ^ ((lowest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                counts += tl.where(left == lowest, tl.sum((runs > value).to(tl.int32), axis=0), 0)
                left = tl.where(left == lowest, NONE_LEFT, left)
                lowest = tl.min(left, axis=0)

    part_size = 4 + num_columns
    row_parts_ptr = parts_ptr + row * num_chunks * part_size
    part_ptr = row_parts_ptr + chunk * part_size
    tl.store(part_ptr, peak.to(tl.int32, bitcast=True))
    tl.store(part_ptr + 1, total.to(tl.int32, bitcast=True))
    if HAS_ENTROPY:
        tl.store(part_ptr + 2, weighted.to(tl.int32, bitcast=True))
    tl.store(part_ptr + 3, argmax)
    if WIDTH > 0:
        tl.store(part_ptr + 4 + place, counts, mask=valid)
    # The lanes' stores come before the one lane's release.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(arrivals_ptr + row, 0)
        if WIDTH > 0:
            inside = place < num_columns
            tl.store(chosen_ptr + row * num_columns + place, tl.where(valid, wanted, 0.0), mask=inside)
            ranks = valid.to(tl.int32)
            for first_merged in range(0, num_chunks, MERGED_CHUNKS):
                merged = first_merged + tl.arange(0, MERGED_CHUNKS)[:, None]
                at = row_parts_ptr + merged * part_size + 4 + place[None, :]
                is_counted = (merged < num_chunks) & valid[None, :]
                merged_counts = tl.load(at, mask=is_counted, other=0, cache_modifier=".cg")
                ranks += tl.sum(merged_counts, axis=0)
            tl.store(ranks_ptr + row * num_columns + place, ranks, mask=inside)
        _merge_statistics(
            row, row_parts_ptr, part_size, num_chunks, vocab_size, statistics_ptr, argmax_ptr, HAS_ENTROPY, ALL_CHUNKS
        )


@triton.jit
def _merge_statistics(
    row,
    row_parts_ptr,
    part_size,
    num_chunks,
    vocab_size,
    statistics_ptr,
    argmax_ptr,
    HAS_ENTROPY: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
):
    num_rows = tl.num_programs(0) // num_chunks
    chunk = tl.arange(0, ALL_CHUNKS)
    inside = chunk < num_chunks
    part_ptr = row_parts_ptr + chunk * part_size
    # Other programs wrote it, so read past the L1 cache.
    maxima = tl.load(part_ptr, mask=inside, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    maxima = tl.where(inside, maxima, float("-inf"))
    sums = tl.load(part_ptr + 1, mask=inside, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    argmaxima = tl.load(part_ptr + 3, mask=inside, other=vocab_size, cache_modifier=".cg")
    highest = tl.max(maxima, axis=0)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    shifts = maxima - base
    scales = tl.exp(shifts)
    total = tl.sum(sums * scales, axis=0)
    log_total = tl.log(total)
    tl.store(statistics_ptr + row, log_total + base)
    tl.store(statistics_ptr + num_rows + row, highest)
    if HAS_ENTROPY:
        weighted = tl.load(part_ptr + 2, mask=inside, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
        mean = tl.sum((weighted + tl.maximum(shifts, -200.0) * sums) * scales, axis=0) / total
        entropy = log_total - mean
        # Not tl.maximum, which drops NaN.
        tl.store(statistics_ptr + 2 * num_rows + row, tl.where(entropy < 0.0, 0.0, entropy))
    lowest_id = tl.min(tl.where(maxima == highest, argmaxima, vocab_size), axis=0)
    # No column equals a NaN maximum.
    tl.store(argmax_ptr + row, tl.minimum(lowest_id, vocab_size - 1))

"""Triton implementation of `gumbel_sample`: the noise is made in registers, so the logits are read once and nothing the
size of the vocabulary is written.

A row is cut into chunks; a second kernel takes the best of the chunks' best. One Philox call serves four neighbouring
ids, which one thread reads at once; so a chunk begins with an id that is a multiple of four, up to three columns before
the row. The kernel masks these, and the last chunk's tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def gumbel_sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, idx_mapping: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    first_group, skipped = divmod(first_id, 4)
    num_chunks = triton.cdiv(skipped + vocab_size, _BLOCK)
    sampled = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return sampled, scores
    chunk_best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    rows = logits, logits.stride(0), vocab_size
    chunks = chunk_best, chunk_ids
    slots = temperature, seeds, positions, idx_mapping
    _gumbel_kernel[(num_rows, num_chunks)](*rows, *slots, first_group, skipped, *chunks, BLOCK=_BLOCK)
    padded = triton.next_power_of_2(num_chunks)
    _best_kernel[(num_rows,)](*chunks, num_chunks, first_id, sampled, scores, CHUNKS=padded)
    return sampled, scores


@triton.jit
def _gumbel_kernel(
    logits_ptr,  # float32 [R, V]
    logits_stride,
    vocab_size,
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    positions_ptr,  # int64 [R]
    idx_mapping_ptr,  # int [R]
    first_group,
    skipped,
    chunk_best_ptr,  # float32 [R, chunks]
    chunk_ids_ptr,  # int32 [R, chunks]
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK - skipped + tl.arange(0, BLOCK)
    inside = (column >= 0) & (column < vocab_size)
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf"))
    # A NaN is not equal to itself, and must never win.
    scores = tl.where(logits == logits, logits, float("-inf"))
    slot = tl.load(idx_mapping_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    if temperature != 0.0:
        group = (first_group + chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        position = tl.load(positions_ptr + row)
        nothing = tl.zeros_like(group)
        low = nothing + (position & 0xFFFFFFFF).to(tl.uint32)
        high = nothing + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        lane0, lane1, lane2, lane3 = tl.philox(tl.load(seeds_ptr + slot), group, low, high, nothing)
        bits = tl.interleave(tl.interleave(lane0, lane2), tl.interleave(lane1, lane3))
        scores += temperature * _gumbel(bits)
    best = tl.max(scores, axis=0)
    cell = row * tl.num_programs(1) + chunk
    tl.store(chunk_best_ptr + cell, best)
    tl.store(chunk_ids_ptr + cell, tl.min(tl.where(inside & (scores == best), column, vocab_size), axis=0))


@triton.jit
def _gumbel(bits):
    """float32 noise from 32 random bits: -log(-log(1 - u)), u = (bits + 0.5) / 2^32 below 1."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log(1 - u) to full precision although 1 - u is rounded: the rounding is divided out.
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    minus_log = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(minus_log)


@triton.jit
def _best_kernel(
    chunk_best_ptr,  # float32 [R, chunks]
    chunk_ids_ptr,  # int32 [R, chunks]
    num_chunks,
    first_id,
    sampled_ptr,  # int32 [R]
    scores_ptr,  # float32 [R]
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    best = tl.load(chunk_best_ptr + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    ids = tl.load(chunk_ids_ptr + row * num_chunks + chunk, mask=inside, other=2147483647)
    highest = tl.max(best, axis=0)
    winner = tl.where(best == highest, ids, 2147483647)
    tl.store(sampled_ptr + row, first_id + tl.min(winner, axis=0))
    tl.store(scores_ptr + row, highest)

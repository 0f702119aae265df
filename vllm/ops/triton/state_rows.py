"""Which tokens and which state a program has: kernels of states share it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vllm import envs


def with_strides(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Each tensor and the distance of its rows, as kernels take them; 0 for None."""
    return tuple(part for each in tensors for part in (each, 0 if each is None else each.stride(0)))


@triton.jit
def row_of(slots_ptr, starts_ptr, lengths_ptr, row, slot_stride):
    """First token, the one behind the last, how many the sequence had before, and where the slot begins in its pool."""
    # As wide as what tokens are multiplied with to find their place.
    first = tl.load(starts_ptr + row).to(tl.int64)
    last = tl.load(starts_ptr + row + 1).to(tl.int64)
    before = tl.load(lengths_ptr + row) - (last - first)
    return first, last, before, tl.load(slots_ptr + row).to(tl.int64) * slot_stride


@triton.jit
def softplus(x):
    """ln(1 + e^x), by a series where 1 + e^-|x| would lose digits; elsewhere by a factor for those that are lost."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 + e * (-0.5 + e * (1.0 / 3.0)))
    return tl.maximum(x, 0.0) + tl.where(e < 0.004, series, tl.log(1.0 + e) * (e / ((1.0 + e) - 1.0)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


CHUNK = 16
"""Tokens that kernels take together: as many as a block of the prefix cache has, at whose borders states are kept."""


KEY_TILE = 16
"""Rows of a state that a chunk's products take at a time: more of float32 spill registers."""


def takes_chunks(num_tokens: int, num_rows: int) -> bool:
    """Whether tokens of a step are taken together where a row has a whole chunk of them, counted from the sequence's
    first token. Sums then have another order than token by token, and which tokens are taken so depends on where a
    sequence is cut: with VLLM_BATCH_INVARIANT none are."""
    return num_tokens >= num_rows + CHUNK - 1 and not envs.batch_invariant()


@triton.jit
def chunks_of(first, last, before, CHUNK: tl.constexpr):
    """The first of a row's tokens that a chunk begins with, and how many whole chunks there are from it on."""
    begin = tl.minimum(first + (CHUNK - before % CHUNK) % CHUNK, last)
    return begin, (last - begin) // CHUNK


@triton.jit
def decays_between(logs, CHUNK: tl.constexpr):
    """From the logarithms of a chunk's decays what is left, at each token, of what each token before it wrote [C, C], 0
    for those after it; and of what was there before the chunk [C]. Sums are of the tokens between, as the difference
    of two sums from the beginning would lose digits."""
    t = tl.arange(0, CHUNK)
    until = t[:, None] >= t[None, :]
    after = tl.where(t[:, None] > t[None, :], logs[:, None], 0.0)
    sums = tl.dot(until.to(tl.float32), after, input_precision="ieee")
    from_begin = tl.sum(tl.where(until, logs[None, :], 0.0), axis=1)
    return tl.where(until, tl.exp(sums), 0.0), tl.exp(from_begin)


@triton.jit
def write_chunk(
    state_ptr,  # [K, V], a block of its columns
    k_ptr,  # [C, K]
    inputs,  # [C, V]
    left,
    is_value,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The state in memory becomes what a chunk leaves of it and what its tokens write: left S + k^T inputs."""
    # All have read the state.
    tl.debug_barrier()
    for key in range(0, KEYS, TILE):
        i = key + tl.arange(0, TILE)
        inside = (i < KEYS)[:, None] & is_value[None, :]
        state = tl.load(state_ptr + i[:, None] * VALUES, mask=inside, other=0.0)
        k = tl.load(k_ptr + i[None, :], mask=(i < KEYS)[None, :], other=0.0).to(tl.float32)
        state = tl.dot(tl.trans(k), inputs, state * left, input_precision="ieee")
        tl.debug_barrier()
        tl.store(state_ptr + i[:, None] * VALUES, state, mask=inside)

"""Readings without logits in memory: the head's product and what `token_readings` reads of it, tile by tile."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.count_above import check_table
from vllm.ops.float_linear import float_linear
from vllm.ops.token_readings import RowReadings, token_readings

# Logits of the reference that exist at one time, in float32.
_REFERENCE_BYTES = 64 * 2**20


def linear_readings(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, num_token_ids: Tensor | None = None, ranks: bool = True
) -> RowReadings:
    """`token_readings` of `hidden` times the transpose of `weight`, without entropy, in a fraction of the logits'
    memory.

    The logits are the float32 sums of the products, not rounded to the inputs' dtype. Ties share the better rank.
    `hidden` [R, H] and `weight` [V, H] have one dtype, float32, bfloat16 or float16, and a contiguous last dimension;
    the other arguments are those of `token_readings`. ValueError for a wrong shape or dtype.
    """
    _check(hidden, weight, token_ids, num_token_ids)
    # Matrix units round float32 inputs to TF32.
    if implementation(hidden) == "triton" and hidden.dtype != torch.float32:
        function = triton_function("linear_readings", __name__)
        return RowReadings(*function(hidden, weight, token_ids, num_token_ids, ranks))
    return _reference(hidden, weight, token_ids, num_token_ids, ranks)


def has_linear_readings(hidden: Tensor) -> bool:
    """Whether such hidden states have a kernel; the reference is slow. With VLLM_BATCH_INVARIANT they are read as those
    of generated tokens are, to the same bits."""
    if envs.batch_invariant():
        return False
    is_16_bit = hidden.dtype in (torch.bfloat16, torch.float16)
    return implementation(hidden) == "triton" and is_16_bit and _multiplies_tiles(hidden.device)


@lru_cache(maxsize=8)
def _multiplies_tiles(device: torch.device) -> bool:
    """Whether Triton uses the device's tensor cores; on Turing it does not, and logits in memory are faster."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _check(hidden: Tensor, weight: Tensor, token_ids: Tensor, num_token_ids: Tensor | None) -> None:
    if hidden.dim() != 2 or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"hidden must be [R, H] in float32, bfloat16 or float16, got {hidden.dtype} {tuple(hidden.shape)}"
        )
    if weight.dim() != 2 or not len(weight) or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight must be {hidden.dtype} [V, {hidden.shape[1]}] with V > 0, got {weight.dtype} {tuple(weight.shape)}"
        )
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.shape[1] > 1 and matrix.stride(1) != 1:
            raise ValueError(f"{name}'s last dimension must be contiguous, got strides {matrix.stride()}")
    check_table(len(hidden), "token_ids", token_ids, torch.int32, num_token_ids)


def _reference(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, num_token_ids: Tensor | None, ranks: bool
) -> RowReadings:
    num_rows = max(1, _REFERENCE_BYTES // (4 * len(weight)))
    parts = []
    for first in range(0, max(1, len(hidden)), num_rows):
        rows = slice(first, first + num_rows)
        counts = None if num_token_ids is None else num_token_ids[rows]
        parts.append(token_readings(float_linear(hidden[rows], weight), token_ids[rows], counts, ranks=ranks))
    fields = zip(*(part[:5] for part in parts), strict=True)
    return RowReadings(*(torch.cat(field) for field in fields))

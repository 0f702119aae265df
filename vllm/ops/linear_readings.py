"""Readings of logits that nobody keeps: the head's product and what `token_readings` reads of it, tile by tile."""

from __future__ import annotations

from functools import lru_cache

import torch

from vllm.ops._dispatch import implementation
from vllm.ops.float_linear import float_linear
from vllm.ops.token_readings import Readings, token_readings

# Logits of the reference that exist at one time, in float32.
_REFERENCE_BYTES = 64 * 2**20


def linear_readings(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    num_token_ids: torch.Tensor | None = None,
) -> Readings:
    """Read chosen tokens of each row of `hidden` times the transpose of `weight`, without the rows of logits.

    What is read are the float32 sums of the products, not rounded to the inputs' dtype: two tokens tie where their sums
    do, and results differ from those of rounded logits by that rounding. Ties share the better rank. No more memory is
    taken than a small part of what the logits would need.

    Args:
        hidden: [R, H], float32, bfloat16 or float16; the last dimension contiguous.
        weight: [V, H] of the same dtype; the last dimension contiguous.
        token_ids: int32 [R, W], each in [0, V). An id may stand twice.
        num_token_ids: int32 [R], how many leading columns of each row hold an id; the others are padding,
            whose ids are not looked at. None: all W.

    Returns:
        As `token_readings`, without entropy.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    _check(hidden, weight, token_ids, num_token_ids)
    # Float32 products on matrix units are not float32's.
    if implementation(hidden) == "triton" and hidden.dtype != torch.float32:
        from vllm.ops.triton import linear_readings as kernels

        return Readings(*kernels.linear_readings(hidden, weight, token_ids, num_token_ids))
    return _reference(hidden, weight, token_ids, num_token_ids)


def has_linear_readings(hidden: torch.Tensor) -> bool:
    """Whether there is a kernel for such hidden states that needs no logits in memory; the reference is slow."""
    is_16_bit = hidden.dtype in (torch.bfloat16, torch.float16)
    return implementation(hidden) == "triton" and is_16_bit and _multiplies_tiles(hidden.device)


@lru_cache(maxsize=8)
def _multiplies_tiles(device: torch.device) -> bool:
    """Whether Triton uses the device's tensor cores; on Turing it does not, and logits in memory are faster."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, num_token_ids: torch.Tensor | None
) -> None:
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
    if token_ids.dim() != 2 or len(token_ids) != len(hidden) or token_ids.dtype != torch.int32:
        raise ValueError(f"token_ids must be int32 [{len(hidden)}, W], got {token_ids.dtype} {tuple(token_ids.shape)}")
    if num_token_ids is not None and (num_token_ids.shape != hidden.shape[:1] or num_token_ids.dtype != torch.int32):
        raise ValueError(
            f"num_token_ids must be int32 [{len(hidden)}], got {num_token_ids.dtype} {tuple(num_token_ids.shape)}"
        )


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, num_token_ids: torch.Tensor | None
) -> Readings:
    num_rows = max(1, _REFERENCE_BYTES // (4 * len(weight)))
    parts = []
    for first in range(0, max(1, len(hidden)), num_rows):
        rows = slice(first, first + num_rows)
        counts = None if num_token_ids is None else num_token_ids[rows]
        parts.append(token_readings(float_linear(hidden[rows], weight), token_ids[rows], counts))
    fields = zip(*(part[:5] for part in parts), strict=True)
    return Readings(*(torch.cat(field) for field in fields))

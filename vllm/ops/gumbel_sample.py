"""Sampling as an argmax over logits plus Gumbel noise, a pure function of (seed, position, token id)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched

_MASK = 0xFFFFFFFF
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# The greatest float32 below 1: noise stays finite.
_BELOW_ONE = 1.0 - 2.0**-24


@dispatched
def gumbel_sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, idx_mapping: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one token from softmax(logits / temperature) of each row.

    Token i's noise is a standard Gumbel variable made from 32 random bits: lane i % 4 of Philox4x32-10 with the slot's
    seed (low word, high word) as key and (i // 4, position low, position high, 0) as counter. So a draw depends on seed
    and position, not on the batch. Of a vocabulary in slices, the slice with the greatest score holds the row's token.

    Args:
        logits: float32 [R, V]; the last dimension contiguous, any stride between rows. -inf = ruled out.
        temperature: float32 [S], by slot; 0 = the greatest logit, the lowest id among equals.
        seeds, positions: int64 [S] by slot, and int64 [R] by row.
        idx_mapping: int32 [R], each row's slot.
        first_id: token id of column 0, at least 0.

    Returns:
        Tokens int32 [R], and their scores float32 [R], logits + temperature * noise. A row of -inf only draws
        `first_id`; a NaN is drawn only from a row without any other value.
    """
    slots = idx_mapping.to(torch.int64)
    noise = _gumbel(_random_bits(seeds[slots], positions, logits.shape[1], first_id))
    # logits + temperature * noise has the argmax of logits / temperature + noise, without overflow when the
    # temperature is tiny.
    scores = torch.where(logits.isnan(), -torch.inf, logits) + temperature[slots][:, None] * noise
    column = torch.arange(logits.shape[1], device=logits.device)
    best = scores.amax(dim=-1, keepdim=True)
    token_ids = first_id + torch.where(scores == best, column, logits.shape[1]).amin(dim=-1)
    return token_ids.to(torch.int32), best.squeeze(-1)


def _gumbel(bits: Tensor) -> Tensor:
    """float32 noise from 32 random bits (int64). The long upper tail comes from small bits, where a float is finest, so
    rare tokens are drawn as often as they should be."""
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _random_bits(seeds: Tensor, positions: Tensor, num_tokens: int, first_id: int = 0) -> Tensor:
    """int64 [R, num_tokens], 32 random bits for each id from `first_id` on."""
    first_group, skipped = divmod(first_id, 4)
    num_groups = (skipped + num_tokens + 3) // 4
    groups = torch.arange(first_group, first_group + num_groups, dtype=torch.int64, device=seeds.device)
    low, high = (positions & _MASK)[:, None], (positions >> 32 & _MASK)[:, None]
    words = [groups[None, :].expand(len(seeds), -1), low, high, torch.zeros_like(groups)[None, :]]
    keys = [(seeds & _MASK)[:, None], (seeds >> 32 & _MASK)[:, None]]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(words[0], _ROUND_MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _ROUND_MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [key + step & _MASK for key, step in zip(keys, _KEY_INCREMENTS, strict=True)]
    lanes = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    return lanes.flatten(1)[:, skipped : skipped + num_tokens]


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of words * factor. int64 would overflow, so the factor goes in two halves."""
    low = words * (factor & 0xFFFF)
    high = words * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF

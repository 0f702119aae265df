"""Slopes of ALiBi (arXiv:2108.12409): the bias on a score is slope * (key position - query position)."""

from __future__ import annotations

import math

import torch


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2 ** (-8 i / n) for the i-th of n heads; for other n than powers of two, those of the power below, then every
    other one of twice as many heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return tuple(slopes)


def bfloat16_slopes(num_heads: int) -> tuple[float, ...]:
    """`alibi_slopes`, rounded to bfloat16."""
    return tuple(torch.tensor(alibi_slopes(num_heads)).bfloat16().tolist())


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """2 ** (-bias_max i / n) for the power of two n at or above the heads; for other counts, every other one first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])

"""Groups of columns that share a scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_group_size(value: object) -> int:
    """A group_size of a configuration: a positive number, or -1 for whole rows. ValueError: it is neither."""
    if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < 1):
        raise ValueError(f"group_size must be -1 or at least 1, got {value!r}")
    return value


def group_reason(group_size: int) -> str:
    """End of an error about the number of groups."""
    return f", for group_size={group_size} in quantization_config"


def num_groups(width: int, group_size: int, may_end_early: bool = False) -> int:
    """Groups of a row of `width`, of which the last may have fewer if it `may_end_early`. ValueError: the size does not
    divide it."""
    if group_size == -1:
        return 1
    if may_end_early:
        return -(-width // group_size)
    if width % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {width} inputs")
    return width // group_size


def sort_groups(group_of: Tensor, regular: int, count: int) -> tuple[Tensor | None, int, Tensor | None]:
    """An order of the columns in which those of a group follow each other.

    Args:
        group_of: of each column its group, int [K].
        regular: the group size without reordering.
        count: the number of groups, of which some may have no column.

    Returns:
        The columns in that order, int64 [K] (None: as they are), the number of columns that share scales, and of each
        so many columns their group (None: 0, 1, 2 ...).
    """
    group_of = group_of.long()
    width = len(group_of)
    if torch.equal(group_of, torch.arange(width) // regular):
        return None, regular, None
    order = torch.argsort(group_of, stable=True)
    size = math.gcd(*torch.bincount(group_of).tolist())
    groups = group_of[order][::size]
    in_order = torch.equal(order, torch.arange(width))
    is_whole = torch.equal(groups, torch.arange(count))
    return None if in_order else order, size, None if is_whole else groups


def as_zero_points(zeros: Tensor) -> int | Tensor:
    """uint8 [N, G], or the one number that all of them are."""
    first = int(zeros[0, 0]) if zeros.numel() else 0
    return first if (zeros == first).all() else zeros.contiguous()

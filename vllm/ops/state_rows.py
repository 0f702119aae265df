"""Rows of tokens and their states in pools, as PyTorch references of operations go through them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def clear_new(pool: Tensor, state_slots: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Zero the states [slots, ...] of rows whose sequence begins."""
    pool[state_slots[seq_lens == query_start_loc.diff()]] = 0


def steps(state_slots: Tensor, query_start_loc: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, slots), both int64: the first token of each row and where its state is, then of the rows that have one
    the second, and so on."""
    lengths = query_start_loc.diff()
    for step in range(int(lengths.max()) if len(lengths) else 0):
        rows = torch.nonzero(lengths > step)[:, 0]
        yield query_start_loc[rows].long() + step, state_slots[rows]

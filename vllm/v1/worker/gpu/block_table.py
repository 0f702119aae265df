"""Which KV blocks each slot's request owns, in order."""

from __future__ import annotations

import numpy as np


class BlockTables:
    """int32 [S, B] block ids by slot, on the host; a step gathers the rows and columns it needs."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.table = np.zeros((max_num_reqs, -(-(max_model_len + 1) // block_size)), dtype=np.int32)  # [S, B]
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int32)  # [S]

    def set_row(self, slot: int, block_ids: list[int]) -> None:
        """Replace the slot's blocks."""
        self.table[slot, : len(block_ids)] = block_ids
        self.num_blocks[slot] = len(block_ids)

    def append(self, slot: int, block_ids: list[int]) -> None:
        """Add blocks at the end of the slot's row."""
        start = self.num_blocks[slot]
        self.table[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)

    def gather(self, slots: np.ndarray, max_seq_len: int) -> np.ndarray:
        """int32 [R, ceil(max_seq_len / block_size)]: the rows of `slots`, as wide as the longest one needs."""
        return self.table[slots, : -(-max_seq_len // self.block_size)]

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [T]: the KV cache slot of each token, given its request's slot and its position (both [T])."""
        blocks = self.table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

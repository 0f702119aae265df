"""Readings of a prompt: blocks of rows as they arrive, in the columns of the request; entries by position on access."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vllm.logprobs.flat import FlatArrays, FlatLogprobs, first_of_equals
from vllm.logprobs.lists import LogprobsRows
from vllm.logprobs.tables import PromptTables, requested_cells


class PromptLogprobs(FlatLogprobs):
    """The readings of a prompt, one entry a prompt position: None for the first `num_unread` (at least 1, as the first
    token has no context).

    `prompt_logprobs[i]` holds the prompt's i-th token first (its logprob given the tokens before it), then the top-k,
    then the requested ids. The arrays and `select` cover the positions that were read. `tables()` has the columns of
    the request.
    """

    def __init__(self, num_unread: int = 1, requested: np.ndarray | None = None, **options: Any) -> None:
        """
        Args:
            num_unread: positions without readings.
            requested: int32 [P, K], the ids requested at each position that is read, -1 as padding; [1, K]: the same
                at all.
            options: see FlatLogprobs.
        """
        super().__init__(**options)
        self.num_unread = num_unread
        self._requested = requested
        # int32 [rows, 4 w + 2] each. They stay: entries have lost the requested columns.
        self._blocks: list[np.ndarray] = []
        self._num_flat_blocks = 0  # that are in `_flat`, too

    def append_rows(self, run: LogprobsRows) -> None:
        """Add a copy of each of the rows as a position."""
        lists, rows, num_token_ids = run[:3]
        self._own_topk = lists.own_topk(self._num_topk)
        self._blocks.append(lists.block(rows, self._num_topk, num_token_ids))

    def requested_logprobs(self, num_positions: int) -> np.ndarray | None:
        """Logprobs of the requested ids, float32 [P, K] with columns as requested, -inf at padding; logits in a
        `*_logits` mode. None if none were requested, or if others than `num_positions` have been read so far."""
        if self._requested is None or self._length != num_positions:
            return None
        ids = self._requested_rows(0, num_positions)
        part = 2 if self._as_logits else 1
        return requested_cells(self._blocks, part, ids, 0, self._own_topk, np.dtype(np.float32), -np.inf)

    @property
    def num_cells(self) -> int:
        """Entries that were read so far."""
        return sum(len(block) * (block.shape[1] // 4) for block in self._blocks)

    def tables(self) -> PromptTables:
        """The readings so far as rectangular arrays; copies."""
        ids = self._requested_rows(0, self._length)
        options = self._own_topk, ids, self.num_unread, self._has_entropy, self._has_ranks
        return PromptTables.of(self._blocks, *options)

    def parts(self, num_entries: int) -> Iterator[FlatLogprobs]:
        if self._num_flat_blocks == len(self._blocks):
            if self._length:
                yield self
            return
        first = 0
        for block in self._blocks:
            step = max(1, num_entries // (block.shape[1] // 4))
            for start in range(0, len(block), step):
                part = self._empty()
                part._flat = self._flatten_rows(block[start : start + step], first + start)
                part._ends = np.cumsum(part._flat.counts)
                yield part
            first += len(block)

    @property
    def _length(self) -> int:
        return sum(map(len, self._blocks))

    def _requested_rows(self, first: int, count: int) -> np.ndarray:
        """int32 [count, K]."""
        ids = self._requested
        if ids is None:
            return np.empty((count, 0), np.int32)
        return np.broadcast_to(ids, (count, ids.shape[1])) if len(ids) == 1 else ids[first : first + count]

    def _arrays(self) -> FlatArrays:
        new = self._blocks[self._num_flat_blocks :]
        if new:
            first = len(self._ends)
            parts = [self._flat] if first else []
            for block in new:
                parts.append(self._flatten_rows(block, first))
                first += len(block)
            self._flat = parts[0] if len(parts) == 1 else FlatArrays(*map(np.concatenate, zip(*parts, strict=True)))
            self._ends = np.cumsum(self._flat.counts)
            self._num_flat_blocks = len(self._blocks)
        return self._flat

    def _flatten_rows(self, rows: np.ndarray, first: int) -> FlatArrays:
        """The entries of consecutive rows, of which the first is the `first` of all."""
        if self._requested is None:
            return self._flatten(rows)
        num_requested = rows.shape[1] // 4 - 1 - self._own_topk
        return self._flatten(rows, first_of_equals(self._requested_rows(first, len(rows))[:, :num_requested]))

    def __len__(self) -> int:
        return self._length + self.num_unread

    def _position(self, index: int) -> Any:
        return None if index < self.num_unread else super()._position(index - self.num_unread)

"""The readings of one step on the host, and references to rows of them.

Layout of a row: int32 [4 W + 2], floats as their bits: W token ids, logprobs, logits and ranks, then lse and entropy
(NaN when not requested). A step's table has one width; a request copies its own columns (`LogprobsLists.row`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

WIDEST_TABLE = 1024
"""Wider rows are copied from the step's arrays: they are few, and a table would be a further copy."""
_ENDS = 2  # words of a row after its cells: lse and entropy


def row_width(row: bytes) -> int:
    """The number of cells, w, of a row of 4 w + 2 words."""
    return (len(row) // 4 - _ENDS) // 4


class StepArrays(NamedTuple):
    """The arrays of LogprobsLists."""

    token_ids: np.ndarray  # int32 [L, W]
    logprobs: np.ndarray  # float32 [L, W]
    logits: np.ndarray  # float32 [L, W]
    ranks: np.ndarray  # int32 [L, W]
    lse: np.ndarray  # float32 [L], log of the sum of exp of the row's logits
    entropy: np.ndarray | None = None  # float32 [L], in nats; None when no row asked for it


def _array(name: str) -> Any:
    return property(lambda self: getattr(self.arrays(), name))


class LogprobsLists:
    """The readings of one step's L rows. W = 1 + K + M columns: the sampled token, K = `num_topk` top-k entries, M
    requested ids. Cells that a row did not request hold 0 and are never displayed.

    Made from arrays or from one table; the other form is computed on first use, as this is made in the step loop.
    """

    __slots__ = ("_arrays", "_first", "_table", "has_entropy", "layout", "num_topk")

    def __init__(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        logits: np.ndarray,
        ranks: np.ndarray,
        lse: np.ndarray,
        num_topk: int,
        entropy: np.ndarray | None = None,
    ) -> None:
        arrays = StepArrays(token_ids, logprobs, logits, ranks, lse, entropy)
        self._set(num_topk, token_ids.shape[1], entropy is not None, arrays, None)

    @classmethod
    def of_table(cls, table: np.ndarray, num_topk: int, has_entropy: bool) -> LogprobsLists:
        """The readings of a table, int32 [L, 4 W + 2], without a copy."""
        lists = cls.__new__(cls)
        lists._set(num_topk, table.shape[1] // 4, has_entropy, None, table)
        return lists

    def _set(
        self, num_topk: int, width: int, has_entropy: bool, arrays: StepArrays | None, table: np.ndarray | None
    ) -> None:
        self.num_topk = num_topk
        self.layout = num_topk, width  # K, W
        self.has_entropy = has_entropy  # requested by some row
        self._arrays = arrays
        self._table = table
        self._first: list[float] | None = None

    @property
    def has_table(self) -> bool:
        return self._table is not None

    def arrays(self) -> StepArrays:
        """The arrays; views of the table if this was made from one."""
        if self._arrays is None:
            assert self._table is not None
            table, (_, width) = self._table, self.layout
            token_ids, logprobs, logits, ranks = (table[:, part * width : (part + 1) * width] for part in range(4))
            lse, entropy = table[:, -2:].view(np.float32).T
            logprobs, logits = logprobs.view(np.float32), logits.view(np.float32)
            self._arrays = StepArrays(token_ids, logprobs, logits, ranks, lse, entropy if self.has_entropy else None)
        return self._arrays

    def table(self) -> np.ndarray:
        """int32 [L, 4 W + 2]."""
        if self._table is None:
            token_ids, logprobs, logits, ranks, lse, entropy = self.arrays()
            _, width = self.layout
            table = np.empty((len(lse), 4 * width + _ENDS), np.int32)
            for part, cells in enumerate((token_ids, logprobs, logits, ranks)):
                table[:, part * width : (part + 1) * width] = cells.view(np.int32)
            table[:, -2] = lse.view(np.int32)
            table[:, -1].view(np.float32)[:] = np.nan if entropy is None else entropy
            self._table = table
        return self._table

    def own_topk(self, num_topk: int) -> int:
        """How many of the K top-k columns a request for `num_topk` (-1 = all) has."""
        return self.num_topk if num_topk < 0 else min(num_topk, self.num_topk)

    def row(self, index: int, num_topk: int, num_token_ids: int) -> bytes:
        """A request's part of a row, 4 w + 2 words with w = 1 + own top-k (`num_topk`, -1 = all) + `num_token_ids`."""
        topk, width = self.layout
        own = self.own_topk(num_topk)
        is_whole = own == topk and 1 + topk + num_token_ids == width
        if width <= WIDEST_TABLE:
            row = self.table()[index]
            return (row if is_whole else row[_own_columns(topk, width, own, num_token_ids)]).tobytes()
        spans = slice(1 + own), slice(1 + topk, 1 + topk + num_token_ids)
        *cells, lse, entropy = self.arrays()
        ends = np.array([lse[index], np.nan if entropy is None else entropy[index]], np.float32)
        return b"".join(
            [*(np.ascontiguousarray(part[index][span]).data for part in cells for span in spans), ends.data]
        )

    def block(self, rows: slice, num_topk: int, num_token_ids: int) -> np.ndarray:
        """Copies of consecutive rows as `row` gives one, int32 [rows, 4 w + 2]."""
        topk, width = self.layout
        own = self.own_topk(num_topk)
        if width <= WIDEST_TABLE:
            table = self.table()[rows]
            is_whole = own == topk and 1 + topk + num_token_ids == width
            return table.copy() if is_whole else table[:, _own_columns(topk, width, own, num_token_ids)]
        *cells, lse, entropy = self.arrays()
        spans = slice(1 + own), slice(1 + topk, 1 + topk + num_token_ids)
        ends = [lse[rows], np.full_like(lse[rows], np.nan) if entropy is None else entropy[rows]]
        return np.concatenate(
            [
                *(part[rows, span].view(np.int32) for part in cells for span in spans),
                *(np.ascontiguousarray(end).view(np.int32)[:, None] for end in ends),
            ],
            axis=1,
        )

    token_ids: np.ndarray = _array("token_ids")
    logprobs: np.ndarray = _array("logprobs")
    logits: np.ndarray = _array("logits")
    ranks: np.ndarray = _array("ranks")
    lse: np.ndarray = _array("lse")
    entropy: np.ndarray | None = _array("entropy")

    def first_logprob(self, row: int) -> float:
        """The logprob of the row's first column."""
        if self._first is None:
            self._first = self.arrays().logprobs[:, 0].tolist()
        return self._first[row]


@lru_cache(maxsize=256)
def _own_columns(num_topk: int, width: int, own_topk: int, num_token_ids: int) -> np.ndarray:
    cells = np.r_[: 1 + own_topk, 1 + num_topk : 1 + num_topk + num_token_ids]
    return np.concatenate([*(cells + part * width for part in range(4)), [4 * width, 4 * width + 1]])


# A reference to one row: a plain tuple, as every step makes one a request.
LogprobsRow = tuple[LogprobsLists, int]


class LogprobsRows(NamedTuple):
    """A reference to consecutive rows of one request."""

    lists: LogprobsLists
    rows: slice
    num_token_ids: int  # columns of requested ids
    num_padding: int = 0  # cells of these that hold no id

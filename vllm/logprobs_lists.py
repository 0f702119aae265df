"""The readings of one step as arrays on the host, and references to some of their rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(slots=True, eq=False)
class LogprobsLists:
    """The readings of one step's rows on the host: L rows; W = 1 + K + M columns are the sampled token, then K top-k
    entries, then up to M requested ids (K = `num_topk`). Cells a row did not ask for hold 0 and are never shown."""

    token_ids: np.ndarray  # int32 [L, W]
    logprobs: np.ndarray  # float32 [L, W]
    logits: np.ndarray  # float32 [L, W]
    ranks: np.ndarray  # int32 [L, W]
    lse: np.ndarray  # float32 [L], log of the sum of exp of the row's logits
    num_topk: int
    entropy: np.ndarray | None = None  # float32 [L], in nats; None when no row asked for it
    first_logprobs: list[float] = field(init=False)  # those of the first column
    layout: tuple[int, int] = field(init=False)  # K, W
    _table: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.first_logprobs = self.logprobs[:, 0].tolist()
        self.layout = self.num_topk, self.token_ids.shape[1]

    def table(self) -> np.ndarray:
        """int32 [L, 4 W + 2]: everything side by side, floats by their bits, so that a row is taken at once: token ids,
        logprobs, logits, ranks, lse, entropy (NaN where it was not asked for)."""
        if self._table is None:
            _, width = self.layout
            table = np.empty((len(self.lse), 4 * width + 2), np.int32)
            for part, cells in enumerate((self.token_ids, self.logprobs, self.logits, self.ranks)):
                table[:, part * width : (part + 1) * width] = cells.view(np.int32)
            table[:, -2] = self.lse.view(np.int32)
            table[:, -1].view(np.float32)[:] = np.nan if self.entropy is None else self.entropy
            self._table = table
        return self._table


# One row of a step's readings, by reference: a plain tuple, as a step makes one a request.
LogprobsRow = tuple[LogprobsLists, int]


class LogprobsRows(NamedTuple):
    """Consecutive rows of a step's readings that hold equally many requested ids, by reference."""

    lists: LogprobsLists
    rows: slice
    num_token_ids: int

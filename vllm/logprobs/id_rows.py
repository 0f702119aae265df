"""Token ids to read, one row a position, as arrays: -1 fills up short rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class IdRows(NamedTuple):
    """Rows of ids to read, in the columns of the request; in place of padding, any id."""

    ids: np.ndarray  # int32 [R, K]
    counts: np.ndarray  # int32 [R], a row's columns up to its last id


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [R, K], K the longest row's length, at least 1."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), max(1, int(lengths.max(initial=0)))), -1, dtype=np.int32)
    flat = [token_id for row in rows for token_id in row]
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table


def readable(ids: np.ndarray) -> IdRows:
    """Rows of ids, int32 [R, K] with -1 anywhere."""
    is_id = ids >= 0
    num_last = is_id[:, ::-1].argmax(axis=1) if ids.shape[1] else 0
    counts = np.where(is_id.any(axis=1), ids.shape[1] - num_last, 0).astype(np.int32)
    if is_id.all():
        return IdRows(ids, counts)
    return IdRows(np.maximum(ids[:, : int(counts.max(initial=0))], 0), counts)

"""Token ids to read, one row a position, as arrays: -1 fills up short rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class PackedRows(NamedTuple):
    """Each row's distinct ids, in order, at its beginning; what follows them is 0."""

    ids: np.ndarray  # int32 [R, K]
    counts: np.ndarray  # int32 [R]


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [R, K], K the longest row's length, at least 1."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), max(1, int(lengths.max(initial=0)))), -1, dtype=np.int32)
    flat = [token_id for row in rows for token_id in row]
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table


def pack(ids: np.ndarray) -> PackedRows:
    """The distinct ids of rows, int32 [R, K] with -1 anywhere."""
    order = np.argsort(ids, axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    is_new = ordered >= 0
    is_new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    keep = np.empty_like(is_new)
    np.put_along_axis(keep, order, is_new, axis=1)
    counts = keep.sum(axis=1, dtype=np.int32)
    if keep.all():
        return PackedRows(ids, counts)
    places = np.argsort(~keep, axis=1, kind="stable")[:, : int(counts.max(initial=0))]
    packed = np.take_along_axis(ids, places, axis=1)
    packed[np.arange(packed.shape[1]) >= counts[:, None]] = 0
    return PackedRows(packed, counts)

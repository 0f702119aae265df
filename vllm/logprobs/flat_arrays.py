"""The arrays under FlatLogprobs, and the lookup of ids in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class FlatArrays(NamedTuple):
    """The entries of P positions one after another, E in all; no id twice within a position."""

    token_ids: np.ndarray  # int32 [E]
    logprobs: np.ndarray  # float32 [E]
    logits: np.ndarray  # float32 [E]
    ranks: np.ndarray  # int32 [E]
    lse: np.ndarray  # float32 [P]
    entropy: np.ndarray  # float32 [P], NaN where it was not asked for
    counts: np.ndarray  # int64 [P]


_INTS, _FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)
EMPTY = FlatArrays(_INTS, _FLOATS, _FLOATS, _INTS, _FLOATS, _FLOATS, np.empty(0, np.int64))

# For up to this many ids, comparing with each is faster than sorting.
_FEW = 64


def repeated(token_ids: np.ndarray, num_ranked: int) -> np.ndarray:
    """bool [P, W]: entries whose id is also in an earlier column. Columns: the sampled token, the top-k up to
    `num_ranked`, the requested ids; top-k and requested ids are each distinct."""
    repeated = np.zeros(token_ids.shape, dtype=bool)
    repeated[:, 1:] = token_ids[:, 1:] == token_ids[:, :1]
    ranked, requested = token_ids[:, 1:num_ranked], token_ids[:, num_ranked:]
    if min(ranked.shape[1], requested.shape[1]) <= _FEW:
        if requested.shape[1] <= ranked.shape[1]:
            for column, token in enumerate(requested.T, start=num_ranked):
                repeated[:, column] |= (ranked == token[:, None]).any(axis=1)
        else:
            for token in ranked.T:
                repeated[:, num_ranked:] |= requested == token[:, None]
        return repeated
    for row, (own_ranked, own_requested) in enumerate(zip(ranked, requested, strict=True)):
        repeated[row, num_ranked:] |= np.isin(own_requested, own_ranked)
    return repeated


def select(flat: FlatArrays, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logprobs, logits and ranks [P, W] of `wanted`, int64 [W], at every position; copies. KeyError: an id is
    missing at some position."""
    entries = flat.logprobs, flat.logits, flat.ranks
    if len(wanted) > _FEW:
        where = _find_many(flat, wanted)
    else:
        columns = _find_columns(flat, wanted)
        if columns is not None:
            tables = (each.reshape(len(flat.counts), -1) for each in entries)
            logprobs, logits, ranks = (table[:, columns].copy() for table in tables)
            return logprobs, logits, ranks
        where = _find_few(flat, wanted)
    return flat.logprobs[where], flat.logits[where], flat.ranks[where]


def first_of_equals(ids: np.ndarray) -> np.ndarray:
    """bool [P, M]: of ids, int32 [P, M], those that are not -1 nor in an earlier column."""
    is_first = ids >= 0
    ordered = np.sort(ids, axis=1)
    (twice,) = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1).nonzero()
    if twice.size:
        order = np.argsort(ids[twice], axis=1, kind="stable")
        ordered = ordered[twice]
        is_new = ordered >= 0
        is_new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        own = np.empty_like(is_new)
        np.put_along_axis(own, order, is_new, axis=1)
        is_first[twice] = own
    return is_first


def _find_columns(flat: FlatArrays, wanted: np.ndarray) -> np.ndarray | slice | None:
    """The ids' columns if they are the same at every position; else None. Usually they are the last ones, in order."""
    if not len(flat.token_ids) or (flat.counts != flat.counts[0]).any():
        return None
    table = flat.token_ids.reshape(len(flat.counts), -1)
    width = table.shape[1]
    if 0 < len(wanted) <= width and (table[:, width - len(wanted) :] == wanted).all():
        return slice(width - len(wanted), width)
    columns = (table[0] == wanted[:, None]).argmax(axis=1)
    return None if (table[:, columns] != wanted).any() else columns


def _find_few(flat: FlatArrays, wanted: np.ndarray) -> np.ndarray:
    # An id occurs at most once a position, so that as many matches as positions are one in each.
    where = np.empty((len(flat.lse), len(wanted)), dtype=np.int64)
    for column, token_id in enumerate(wanted.tolist()):
        found = np.flatnonzero(flat.token_ids == token_id)
        if len(found) != len(where):
            raise KeyError(token_id)
        where[:, column] = found
    return where


def _find_many(flat: FlatArrays, wanted: np.ndarray) -> np.ndarray:
    return _find_keys(flat, _keys(np.arange(len(flat.lse))[:, None], wanted[None, :]))


def _keys(positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """An integer for each pair."""
    return (positions.astype(np.int64) << 32) | token_ids.astype(np.int64)


def _find_keys(flat: FlatArrays, targets: np.ndarray) -> np.ndarray:
    """The entries of these `_keys`, any shape."""
    keys = _keys(np.repeat(np.arange(len(flat.lse)), flat.counts), flat.token_ids)
    order = np.argsort(keys, kind="stable")
    found = np.minimum(np.searchsorted(keys[order], targets), max(len(keys) - 1, 0))
    where = order[found] if len(keys) else found
    missing = keys[where] != targets if len(keys) else np.ones_like(targets, dtype=bool)
    if missing.any():
        raise KeyError(int(targets[missing][0] & 0xFFFFFFFF))
    return where

"""Readings of a sequence: rows of bytes as they arrive, arrays on first access, dicts of Logprob on indexing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from vllm.logprobs.lists import LogprobsRow, row_width
from vllm.logprobs.position import (
    WIDEST_DICT,
    KnownTexts,
    Logprob,
    PositionLogprobs,
    TokenDecoder,
    WidePositionLogprobs,
)


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


Position = PositionLogprobs | WidePositionLogprobs


class Readings(NamedTuple):
    """Readings of I chosen ids at P positions, columns in the order requested."""

    logprobs: np.ndarray  # float32 [P, I]
    logits: np.ndarray  # float32 [P, I]
    ranks: np.ndarray  # int32 [P, I]


def _array(name: str) -> Any:
    return property(lambda self: getattr(self._arrays(), name))


class FlatLogprobs(Sequence[Position]):
    """The readings of one completion: a sequence with one `{token_id: Logprob}` a position, over numpy arrays.

    The E entries of all P positions follow each other: position i is the slice `start_indices[i]:end_indices[i]` (int64
    [P]) of `token_ids` (int32), `logprobs`, `logits` (float32) and `ranks` (int32, 0 with `logprob_ranks=False`), all
    [E]. `lse` (log-sum-exp of the logits) and `entropy` (nats, NaN unless `logprob_entropy` requested it) are float32
    [P]. A token that is sampled and requested is one entry. `select(ids)` gives rectangular arrays.
    """

    def __init__(
        self,
        decode: TokenDecoder | None = None,
        num_topk: int = 0,
        as_logits: bool = False,
        has_sampled: bool = True,
        has_entropy: bool = False,
        has_ranks: bool = True,
    ) -> None:
        """
        Args:
            decode: None leaves `decoded_token` None.
            num_topk: the request's own `logprobs` (a step may compute more for other requests); -1 = all.
            as_logits: a `*_logits` mode: `logprob` holds the logit.
            has_sampled: whether the first column, the sampled token, is displayed (max_tokens=0 samples none).
            has_entropy: whether the request asked for the entropy.
            has_ranks: whether it did not leave the ranks out.
        """
        self._decode = decode
        self._num_topk = num_topk
        self._as_logits = as_logits
        self._has_sampled = has_sampled
        self._has_entropy = has_entropy
        self._has_ranks = has_ranks
        self._own_topk = 0
        self._rows: list[bytes] = []  # the last positions, which are not in `_flat` yet
        self._flat = EMPTY
        self._ends = np.empty(0, np.int64)
        self._positions: dict[int, Position] = {}

    def append(self, row: LogprobsRow, num_token_ids: int) -> None:
        """Add a copy of a row with `num_token_ids` requested ids as a position."""
        lists, index = row
        self._own_topk = lists.own_topk(self._num_topk)
        self._rows.append(lists.row(index, self._num_topk, num_token_ids))

    def snapshot(self) -> FlatLogprobs:
        """The positions so far."""
        same = self._empty()
        same._own_topk, same._rows = self._own_topk, self._rows.copy()
        same._flat, same._ends = self._flat, self._ends
        return same

    def __add__(self, other: object) -> FlatLogprobs:
        """These positions, then those of another."""
        if type(self) is not FlatLogprobs or type(other) is not FlatLogprobs:
            return NotImplemented
        both = self._empty()
        parts = [each._arrays() for each in (self, other) if each._length]
        if parts:
            both._flat = FlatArrays(*map(np.concatenate, zip(*parts, strict=True)))
            both._ends = np.cumsum(both._flat.counts)
        both._own_topk = max(self._own_topk, other._own_topk)
        both._has_entropy = self._has_entropy or other._has_entropy
        both._decode = self._decode or other._decode
        return both

    def parts(self, num_entries: int) -> Iterator[FlatLogprobs]:
        """The positions that were read, split into parts of one position or at most `num_entries` entries. Once the
        arrays exist, everything is one part."""
        if self._flat.lse.size or sum(map(row_width, self._rows)) <= num_entries:
            if self._length:
                yield self
            return
        part, room = self._empty(), num_entries
        for row in self._rows:
            width = row_width(row)
            if part._rows and room < width:
                yield part
                part, room = self._empty(), num_entries
            part._own_topk = self._own_topk
            part._rows.append(row)
            room -= width
        yield part

    def _empty(self) -> FlatLogprobs:
        options = self._as_logits, self._has_sampled, self._has_entropy, self._has_ranks
        return FlatLogprobs(self._decode, self._num_topk, *options)

    @property
    def _length(self) -> int:
        return len(self._ends) + len(self._rows)

    def _arrays(self) -> FlatArrays:
        if self._rows:
            parts = [self._flat] if self._flat.lse.size else []
            for width, alike in itertools.groupby(self._rows, key=row_width):
                parts.append(self._flatten(np.frombuffer(b"".join(alike), np.int32).reshape(-1, 4 * width + 2)))
            self._flat = parts[0] if len(parts) == 1 else FlatArrays(*map(np.concatenate, zip(*parts, strict=True)))
            self._ends = np.cumsum(self._flat.counts)
            self._rows = []
        return self._flat

    def _flatten(self, table: np.ndarray, is_requested: np.ndarray | None = None) -> FlatArrays:
        """The displayed entries of rows of w cells, int32 [P, 4 w + 2]; copies. `is_requested`, bool [P, M]: which of
        the last M cells are to be displayed; None: all."""
        width = table.shape[1] // 4
        token_ids, logprobs, logits, ranks = (table[:, part * width : (part + 1) * width] for part in range(4))
        lse, entropy = table[:, 4 * width :].T.copy().view(np.float32)
        own = self._own_topk
        if self._has_sampled:
            keep = ~repeated(token_ids, 1 + own)
        else:
            keep = np.ones(token_ids.shape, dtype=bool)
            keep[:, 0] = False
            keep[:, 1:] = ~repeated(token_ids[:, 1:], own) if own else True
        if is_requested is not None:
            keep[:, width - is_requested.shape[1] :] &= is_requested
        keeps_all = keep.all()
        counts = np.full(len(keep), keep.shape[1]) if keeps_all else keep.sum(axis=1)
        cells = (token_ids, logits if self._as_logits else logprobs, logits, ranks)
        token_ids, shown, logits, ranks = (part.flatten() if keeps_all else part[keep] for part in cells)
        if not self._has_entropy:
            entropy.fill(np.nan)
        if not self._has_ranks:
            ranks = np.zeros_like(ranks)
        return FlatArrays(token_ids, shown.view(np.float32), logits.view(np.float32), ranks, lse, entropy, counts)

    token_ids: np.ndarray = _array("token_ids")
    logprobs: np.ndarray = _array("logprobs")
    logits: np.ndarray = _array("logits")
    ranks: np.ndarray = _array("ranks")
    lse: np.ndarray = _array("lse")
    entropy: np.ndarray = _array("entropy")

    @property
    def has_sampled(self) -> bool:
        """Whether each position's first entry is the sampled token; False with max_tokens=0."""
        return self._has_sampled

    @property
    def start_indices(self) -> np.ndarray:
        return self.end_indices - self._arrays().counts

    @property
    def end_indices(self) -> np.ndarray:
        self._arrays()
        return self._ends

    @property
    def decoded_tokens(self) -> list[str | None]:
        """The text of every entry [E]."""
        return self._texts(self.token_ids)

    def _texts(self, token_ids: np.ndarray) -> list[str | None]:
        if self._decode is None:
            return [None] * len(token_ids)
        return list(self._decode(token_ids))

    def select(self, ids: Sequence[int]) -> Readings:
        """The readings of `ids` at every position, as arrays [P, len(ids)] with columns in the order given. KeyError:
        an id was not read at every position."""
        return Readings(*select(self._arrays(), np.asarray(ids, dtype=np.int64)))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)}")
        return self._position(index % len(self))

    def _position(self, index: int) -> Any:
        position = self._positions.get(index)
        if position is None:
            position = self._positions[index] = self._build(index)
        return position

    def _build(self, index: int) -> Position:
        flat = self._arrays()
        stop = int(self._ends[index])
        span = slice(stop - int(flat.counts[index]), stop)
        lse, entropy = flat.lse[index].item(), flat.entropy[index].item() if self._has_entropy else None
        columns = flat.token_ids[span], flat.logprobs[span], flat.ranks[span], flat.logits[span]
        if len(columns[0]) > WIDEST_DICT:
            return WidePositionLogprobs(columns, self._decode, lse, entropy)
        token_ids, *others = (column.tolist() for column in columns)
        table = zip(token_ids, *others, self._texts(columns[0]), strict=True)
        entries = ((token, Logprob(logprob, rank or None, text, logit)) for token, logprob, rank, logit, text in table)
        return PositionLogprobs(entries, lse, entropy)

    def __iter__(self) -> Iterator[Any]:
        return map(self._position, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """list: callers ask isinstance for it before they read positions. `type` tells what it is."""
        return list

    def __reduce__(self) -> tuple:
        # The default compares the class with `__class__`.
        return object.__new__, (type(self),), self.__getstate__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def __getstate__(self) -> dict:
        known = None if self._decode is None else KnownTexts(self._arrays().token_ids, self._decode)
        return {**vars(self), "_decode": known, "_positions": {}}


SampleLogprobs = FlatLogprobs

"""Readings as users hold them: arrays underneath, dictionaries of Logprob on demand.

The four arrays (token ids, logits, logprobs, ranks) are the ones that the sampling kernel wrote; a Python object per
token is made only for a position that somebody indexes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np


@dataclass(slots=True)
class Logprob:
    """One token's reading at one position.

    Attributes:
        logprob: natural-log probability (in the `*_logits` modes: the logit).
        rank: 1 + the number of vocabulary entries with a strictly greater logit; ties share the better rank.
        decoded_token: the token's text; None without a tokenizer.
        logit: the logit that the logprob was computed from.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    logit: float | None = None


class LogprobsLists(NamedTuple):
    """The readings of one step's rows on the host: L rows; columns are the sampled token, then K top-k entries, then up
    to M requested ids (K = `num_topk`). Cells a row did not ask for hold 0 and are never shown."""

    token_ids: np.ndarray  # int32 [L, 1 + K + M]
    logprobs: np.ndarray  # float32 [L, 1 + K + M]
    logits: np.ndarray  # float32 [L, 1 + K + M]
    ranks: np.ndarray  # int32 [L, 1 + K + M]
    lse: np.ndarray  # float32 [L], log of the sum of exp of the row's logits
    num_topk: int


class LogprobsRow(NamedTuple):
    """One row of a step's readings, by reference."""

    lists: LogprobsLists
    row: int


class PositionLogprobs(dict[int, Logprob]):
    """`{token_id: Logprob}` of one position: the sampled token first, then the top-k by rank, then the ids as asked."""

    __slots__ = ("lse",)

    def __init__(self, entries: Iterable[tuple[int, Logprob]] = (), lse: float = math.nan) -> None:
        super().__init__(entries)
        self.lse = lse

    def __reduce__(self) -> tuple:
        return type(self), (list(self.items()), self.lse)

    def mass(self, ids: Iterable[int]) -> float:
        """Probability that the model gives to the set `ids` together, in [0, 1].

        Raises:
            KeyError: an id that was not read at this position.
        """
        return math.fsum(math.exp(self._logit(i) - self.lse) for i in dict.fromkeys(ids))

    def softmax(self, ids: Sequence[int]) -> dict[int, float]:
        """Probabilities renormalised over `ids` alone, in the order given.

        Raises:
            KeyError: an id that was not read at this position.
        """
        logits = {i: self._logit(i) for i in ids}
        top = max(logits.values(), default=0.0)
        if math.isinf(top):
            # Every id was masked out: no distribution over them exists.
            return dict.fromkeys(logits, math.nan)
        weights = {i: math.exp(logit - top) for i, logit in logits.items()}
        total = math.fsum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    def _logit(self, token_id: int) -> float:
        entry = self[token_id]
        if entry.logit is None:
            raise KeyError(token_id)
        return entry.logit


class Readings(NamedTuple):
    """Readings of chosen ids at every position: P positions, I ids, columns in the order asked."""

    logprobs: np.ndarray  # float32 [P, I]
    logits: np.ndarray  # float32 [P, I]
    ranks: np.ndarray  # int32 [P, I]


class _Flat(NamedTuple):
    """Entries of all positions one after another, duplicates within a position merged. E entries, P positions."""

    token_ids: np.ndarray  # int32 [E]
    logprobs: np.ndarray  # float32 [E]
    logits: np.ndarray  # float32 [E]
    ranks: np.ndarray  # int32 [E]
    lse: np.ndarray  # float32 [P]
    counts: np.ndarray  # int64 [P]


_EMPTY = _Flat(
    np.empty(0, np.int32),
    np.empty(0, np.float32),
    np.empty(0, np.float32),
    np.empty(0, np.int32),
    np.empty(0, np.float32),
    np.empty(0, np.int64),
)

TokenDecoder = Callable[[np.ndarray], list[str]]

# Up to so many ids, a comparison with each is cheaper than a sort.
_FEW = 64


def _repeated(token_ids: np.ndarray, num_ranked: int) -> np.ndarray:
    """bool [P, W]: entries whose token stands in an earlier column. Columns: the sampled token, top-k up to
    `num_ranked`, requested ids; the top-k are distinct, and so are the requested ids."""
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


class FlatLogprobs(Sequence[PositionLogprobs]):
    """The readings of one completion: a sequence with one `{token_id: Logprob}` a position, over numpy arrays.

    The arrays hold the entries of all positions one after another; position i is the slice
    `start_indices[i]:end_indices[i]` of `token_ids` (int32), `logprobs` (float32), `logits` (float32) and `ranks`
    (int32). `lse` (float32) has one value a position. A token that stands twice (sampled and asked for, say) is one
    entry. `select(ids)` gives rectangular arrays.
    """

    def __init__(self, decode: TokenDecoder | None = None, num_topk: int = 0, as_logits: bool = False) -> None:
        """
        Args:
            decode: int32 array [E] of ids -> list of E texts; None leaves `decoded_token` None.
            num_topk: the request's own `logprobs` (a step may have computed more for its neighbours); -1 = all.
            as_logits: a `*_logits` mode: `logprob` carries the logit.
        """
        self._decode = decode
        self._num_topk = num_topk
        self._as_logits = as_logits
        self._pending: list[tuple[LogprobsRow, int]] = []
        self._length = 0
        self._flat = _EMPTY
        self._ends = np.empty(0, np.int64)
        self._positions: dict[int, PositionLogprobs] = {}

    def append_row(self, row: LogprobsRow, num_token_ids: int) -> None:
        """Add a position that holds `num_token_ids` requested ids after the top-k columns."""
        self._pending.append((row, num_token_ids))
        self._length += 1

    # -- arrays -------------------------------------------------------------------------------------------------

    def _arrays(self) -> _Flat:
        if self._pending:
            parts = [self._flat] if self._flat.lse.size else []
            start = 0
            for stop in range(1, len(self._pending) + 1):
                if stop == len(self._pending) or not self._same_layout(self._pending[start], self._pending[stop]):
                    parts.append(self._merge(self._pending[start:stop]))
                    start = stop
            self._flat = _Flat(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
            self._ends = np.cumsum(self._flat.counts)
            self._pending = []
        return self._flat

    @staticmethod
    def _same_layout(a: tuple[LogprobsRow, int], b: tuple[LogprobsRow, int]) -> bool:
        return a[0].lists.num_topk == b[0].lists.num_topk and a[1] == b[1]

    def _merge(self, pending: list[tuple[LogprobsRow, int]]) -> _Flat:
        (first, num_ids) = pending[0]
        widest = first.lists.num_topk
        own = widest if self._num_topk < 0 else min(self._num_topk, widest)
        columns = np.concatenate(
            [np.arange(1 + own), np.arange(1 + widest, 1 + widest + num_ids)], dtype=np.int64, casting="unsafe"
        )
        stop = columns[-1] + 1

        def gather(name: str) -> np.ndarray:
            # Steps differ in width by what the neighbours asked for.
            return np.stack([getattr(row.lists, name)[row.row, :stop] for row, _ in pending])[:, columns]

        token_ids = gather("token_ids")
        keep = ~_repeated(token_ids, 1 + own)
        logits = gather("logits")
        return _Flat(
            token_ids[keep],
            (logits if self._as_logits else gather("logprobs"))[keep],
            logits[keep],
            gather("ranks")[keep],
            np.array([row.lists.lse[row.row] for row, _ in pending], dtype=np.float32),
            keep.sum(axis=1),
        )

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [E]."""
        return self._arrays().token_ids

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [E]."""
        return self._arrays().logprobs

    @property
    def logits(self) -> np.ndarray:
        """float32 [E]."""
        return self._arrays().logits

    @property
    def ranks(self) -> np.ndarray:
        """int32 [E]."""
        return self._arrays().ranks

    @property
    def lse(self) -> np.ndarray:
        """float32 [P]: log-sum-exp of each position's logits."""
        return self._arrays().lse

    @property
    def start_indices(self) -> np.ndarray:
        """int64 [P]: where each position's entries begin."""
        return self.end_indices - self._arrays().counts

    @property
    def end_indices(self) -> np.ndarray:
        """int64 [P]: where each position's entries end."""
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
        """The readings of `ids` at every position, as arrays [P, len(ids)] with columns in the order given.

        Raises:
            KeyError: an id that was not read at every position.
        """
        flat = self._arrays()
        wanted = np.asarray(ids, dtype=np.int64)
        where = self._find_few(wanted) if len(wanted) <= _FEW else self._find_many(wanted)
        return Readings(flat.logprobs[where], flat.logits[where], flat.ranks[where])

    def _find_few(self, wanted: np.ndarray) -> np.ndarray:
        """Indices [P, W] into the flat arrays. An id stands once a position, so as many finds as positions are one
        in each."""
        where = np.empty((len(self), len(wanted)), dtype=np.int64)
        for column, token_id in enumerate(wanted.tolist()):
            found = np.flatnonzero(self._flat.token_ids == token_id)
            if len(found) != len(self):
                raise KeyError(token_id)
            where[:, column] = found
        return where

    def _find_many(self, wanted: np.ndarray) -> np.ndarray:
        """The same by one sort."""
        flat = self._flat
        position = np.repeat(np.arange(len(self), dtype=np.int64), flat.counts)
        keys = (position << 32) | flat.token_ids.astype(np.int64)
        order = np.argsort(keys, kind="stable")
        targets = (np.arange(len(self), dtype=np.int64)[:, None] << 32) | wanted[None, :]
        found = np.minimum(np.searchsorted(keys[order], targets), max(len(keys) - 1, 0))
        where = order[found] if len(keys) else found
        missing = keys[where] != targets if len(keys) else np.ones_like(targets, dtype=bool)
        if missing.any():
            raise KeyError(int(wanted[np.argwhere(missing)[0, 1]]))
        return where

    # -- sequence -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"position {index} of {self._length}")
        index %= self._length
        position = self._positions.get(index)
        if position is None:
            position = self._positions[index] = self._build(index)
        return position

    def _build(self, index: int) -> PositionLogprobs:
        flat = self._arrays()
        stop = int(self._ends[index])
        span = slice(stop - int(flat.counts[index]), stop)
        token_ids = flat.token_ids[span]
        entries = zip(
            token_ids.tolist(),
            flat.logprobs[span].tolist(),
            flat.ranks[span].tolist(),
            self._texts(token_ids),
            flat.logits[span].tolist(),
            strict=True,
        )
        return PositionLogprobs(
            ((token, Logprob(logprob, rank, text, logit)) for token, logprob, rank, text, logit in entries),
            float(flat.lse[index]),
        )

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[i] for i in range(self._length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"

    def __getstate__(self) -> dict:
        # The step's arrays hold other requests' rows too, and the decoder a tokenizer: neither should travel.
        flat = self._arrays()
        texts = self.decoded_tokens
        known = dict(zip(flat.token_ids.tolist(), texts, strict=True)) if self._decode is not None else None
        return {"flat": flat, "texts": known, "num_topk": self._num_topk, "as_logits": self._as_logits}

    def __setstate__(self, state: dict) -> None:
        known = state["texts"]
        decode = None if known is None else _KnownTexts(known)
        self.__init__(decode, state["num_topk"], state["as_logits"])  # type: ignore[misc]
        self._flat = state["flat"]
        self._ends = np.cumsum(self._flat.counts)
        self._length = len(self._flat.lse)


class _KnownTexts:
    """A decoder over texts that were decoded already."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def __call__(self, token_ids: np.ndarray) -> list[str]:
        return [self._texts[token] for token in token_ids.tolist()]


SampleLogprobs = FlatLogprobs

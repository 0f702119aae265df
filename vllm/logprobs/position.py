"""One position's readings by token id: a dict, or a mapping over arrays where there are many."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import numpy as np

TokenDecoder = Callable[[np.ndarray], list[str]]
"""int32 array [E] of ids -> E texts."""
WIDEST_DICT = 256
"""Positions of up to this many entries are dicts."""
_CHUNK = 4096  # entries that a view makes at a time
_SCANS = 8  # lookups by a scan before an index is built, which costs as much as eight of them
_SHOWN = 5  # entries of a wide position in its repr


@dataclass(slots=True)
class Logprob:
    """One token's reading at one position.

    Attributes:
        logprob: natural-log probability (in the `*_logits` modes: the logit).
        rank: 1 + the number of vocabulary entries with a strictly greater logit; ties share the better rank.
            None with `logprob_ranks=False`.
        decoded_token: the token's text; None without a tokenizer.
        logit: the logit that the logprob was computed from.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    logit: float | None = None


class _Distribution:
    """Sums over several of a position's entries."""

    __slots__ = ()

    lse: float

    def mass(self, ids: Iterable[int]) -> float:
        """Total probability of the set `ids`, in [0, 1]. KeyError: an id was not read at this position."""
        return math.fsum(math.exp(self._logit(i) - self.lse) for i in dict.fromkeys(ids))

    def softmax(self, ids: Sequence[int]) -> dict[int, float]:
        """Probabilities renormalised over `ids`, in the order given; NaN if all of them were masked out. KeyError: an
        id was not read at this position."""
        logits = {i: self._logit(i) for i in ids}
        top = max(logits.values(), default=0.0)
        if math.isinf(top):
            return dict.fromkeys(logits, math.nan)
        weights = {i: math.exp(logit - top) for i, logit in logits.items()}
        total = math.fsum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    def _logit(self, token_id: int) -> float:
        logit: float | None = self[token_id].logit  # type: ignore[index]
        if logit is None:
            raise KeyError(token_id)
        return logit


class PositionLogprobs(_Distribution, dict[int, Logprob]):
    """`{token_id: Logprob}` of one position: the sampled token, then the top-k by rank, then the requested ids.

    Attributes:
        lse: log of the sum of exp of the position's logits.
        entropy: of the position's whole distribution, in nats; None unless `logprob_entropy` asked for it.
    """

    __slots__ = ("entropy", "lse")

    def __init__(
        self, entries: Iterable[tuple[int, Logprob]] = (), lse: float = math.nan, entropy: float | None = None
    ) -> None:
        super().__init__(entries)
        self.lse = lse
        self.entropy = entropy

    def __reduce__(self) -> tuple:
        return type(self), (list(self.items()), self.lse, self.entropy)


class WidePositionLogprobs(_Distribution, Mapping[int, Logprob]):
    """A position of more than `WIDEST_DICT` entries: `PositionLogprobs` as a read-only mapping over arrays.

    Each access makes a new `Logprob`; `dict(position)` can be modified.
    """

    __slots__ = ("_columns", "_decode", "_num_looks", "_places", "entropy", "lse")

    def __init__(
        self,
        columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        decode: TokenDecoder | None,
        lse: float,
        entropy: float | None = None,
    ) -> None:
        """`columns`: distinct token ids (int32), displayed logprobs (float32), ranks (int32), logits (float32), all
        [E]; `decode` None leaves `decoded_token` None."""
        self._columns = columns
        self._decode = decode
        self._num_looks = 0
        self._places: np.ndarray | None = None  # int32, by token id: its entry, or -1
        self.lse = lse
        self.entropy = entropy

    def entries(self) -> Iterator[tuple[int, Logprob]]:
        """The entries in order, made lazily."""
        for start in range(0, len(self), _CHUNK):
            yield from self._made(slice(start, start + _CHUNK))

    def _made(self, span: slice) -> Iterator[tuple[int, Logprob]]:
        token_ids, logprobs, ranks, logits = (column[span] for column in self._columns)
        texts: Sequence[str | None] = self._decode(token_ids) if self._decode is not None else [None] * len(token_ids)
        columns = token_ids.tolist(), logprobs.tolist(), ranks.tolist(), texts, logits.tolist()
        for token_id, logprob, rank, text, logit in zip(*columns, strict=True):
            yield token_id, Logprob(logprob, rank or None, text, logit)

    def _place(self, key: Any) -> int:
        """The index of a token id's entry, or -1."""
        try:
            token_id = operator.index(key)
        except TypeError:
            return -1
        token_ids = self._columns[0]
        self._num_looks += 1
        if self._num_looks <= _SCANS:
            (found,) = (token_ids == token_id).nonzero()
            return int(found[0]) if len(found) else -1
        if self._places is None:
            places = np.full(int(token_ids.max()) + 1, -1, np.int32)
            places[token_ids] = np.arange(len(token_ids), dtype=np.int32)
            self._places = places
        return int(self._places[token_id]) if 0 <= token_id < len(self._places) else -1

    def __getitem__(self, token_id: int) -> Logprob:
        place = self._place(token_id)
        if place < 0:
            raise KeyError(token_id)
        token_ids, logprobs, ranks, logits = self._columns
        text = None if self._decode is None else self._decode(token_ids[place : place + 1])[0]
        return Logprob(logprobs[place].item(), ranks[place].item() or None, text, logits[place].item())

    def __contains__(self, token_id: object) -> bool:
        return self._place(token_id) >= 0

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[int]:
        return iter(self._columns[0].tolist())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._columns[0].tolist())

    def items(self) -> ItemsView[int, Logprob]:
        return _Items(self)

    def values(self) -> ValuesView[Logprob]:
        return _Values(self)

    def copy(self) -> dict[int, Logprob]:
        return dict(self.entries())

    def __copy__(self) -> WidePositionLogprobs:
        return WidePositionLogprobs(self._columns, self._decode, self.lse, self.entropy)

    def __repr__(self) -> str:
        shown = ", ".join(f"{token_id}: {entry!r}" for token_id, entry in self._made(slice(_SHOWN)))
        return f"{type(self).__name__}({{{shown}, ... {len(self) - _SHOWN} more}})"

    def __reduce__(self) -> tuple:
        decode = None if self._decode is None else KnownTexts(self._columns[0], self._decode)
        return type(self), (self._columns, decode, self.lse, self.entropy)


class _Items(ItemsView[int, Logprob]):
    _mapping: WidePositionLogprobs

    def __iter__(self) -> Iterator[tuple[int, Logprob]]:
        return self._mapping.entries()


class _Values(ValuesView[Logprob]):
    _mapping: WidePositionLogprobs

    def __iter__(self) -> Iterator[Logprob]:
        return (entry for _, entry in self._mapping.entries())


class KnownTexts:
    """A decoder of the given ids only, which can be pickled without the tokenizer."""

    def __init__(self, token_ids: np.ndarray, decode: TokenDecoder) -> None:
        self._texts = dict(zip(token_ids.tolist(), decode(token_ids), strict=True))

    def __call__(self, token_ids: np.ndarray) -> list[str]:
        return [self._texts[token] for token in token_ids.tolist()]

"""Readings as users hold them: arrays underneath, dictionaries of Logprob on demand.

The four arrays (token ids, logits, logprobs, ranks) are the ones that the sampling kernel wrote; a Python object per
token is made only for a position that somebody indexes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from vllm.flat_arrays import EMPTY, FlatArrays, joined, repeated, select
from vllm.logprobs_lists import WIDEST_TABLE, LogprobsLists, LogprobsRow, LogprobsRows


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


class PositionLogprobs(dict[int, Logprob]):
    """`{token_id: Logprob}` of one position: the sampled token first, then the top-k by rank, then the ids as asked.

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


TokenDecoder = Callable[[np.ndarray], list[str]]

# Token ids, logprobs, logits and ranks [P, 1 + K + M] of P positions.
_Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _each(cells: _Cells, change: Callable[[np.ndarray], np.ndarray]) -> _Cells:
    token_ids, logprobs, logits, ranks = map(change, cells)
    return token_ids, logprobs, logits, ranks


def _layout_of_run(run: LogprobsRows) -> tuple[int, int]:
    return run.lists.num_topk, run.num_token_ids


def _runs_of_one_layout(rows: list[LogprobsRow]) -> Iterator[tuple[tuple[int, int], list[LogprobsRow]]]:
    layouts = [lists.layout for lists, _ in rows]
    if layouts.count(layouts[0]) == len(layouts):
        yield layouts[0], rows
        return
    for layout, run in itertools.groupby(rows, key=lambda row: row[0].layout):
        yield layout, list(run)


class FlatLogprobs(Sequence[PositionLogprobs]):
    """The readings of one completion: a sequence with one `{token_id: Logprob}` a position, over numpy arrays.

    The arrays hold the entries of all positions one after another; position i is the slice
    `start_indices[i]:end_indices[i]` of `token_ids` (int32), `logprobs` (float32), `logits` (float32) and `ranks`
    (int32). `lse` (float32) has one value a position. A token that stands twice (sampled and asked for, say) is one
    entry. `select(ids)` gives rectangular arrays.
    """

    def __init__(
        self,
        decode: TokenDecoder | None = None,
        num_topk: int = 0,
        as_logits: bool = False,
        has_sampled: bool = True,
        has_entropy: bool = False,
    ) -> None:
        """
        Args:
            decode: int32 array [E] of ids -> list of E texts; None leaves `decoded_token` None.
            num_topk: the request's own `logprobs` (a step may have computed more for its neighbours); -1 = all.
            as_logits: a `*_logits` mode: `logprob` carries the logit.
            has_sampled: whether the first column, the sampled token, is shown (nothing is sampled by max_tokens=0).
            has_entropy: whether the request asked for the entropy.
        """
        self._decode = decode
        self._num_topk = num_topk
        self._as_logits = as_logits
        self._has_sampled = has_sampled
        self._has_entropy = has_entropy
        self._pending: list[LogprobsRows] = []
        # Rows that belong behind the pending ones, how many of them, and their number of requested ids.
        self._later: list[tuple[list[LogprobsRow], int, int]] = []
        self._length = 0
        self._flat = EMPTY
        self._ends = np.empty(0, np.int64)
        self._positions: dict[int, PositionLogprobs] = {}

    def append_later(self, rows: list[LogprobsRow], num_token_ids: int) -> None:
        """Add the positions that `rows` holds now, each with `num_token_ids` requested ids after the top-k columns.
        They are put together when somebody looks; until then the list may grow, but must not change otherwise."""
        if rows:
            self._later.append((rows, len(rows), num_token_ids))
            self._length += len(rows)

    def _append_now(self) -> None:
        later, self._later = self._later, []
        for rows, count, num_token_ids in later:
            for lists, row in itertools.islice(rows, count):
                self._pending.append(LogprobsRows(lists, slice(row, row + 1), num_token_ids))

    def append_rows(self, rows: LogprobsRows) -> None:
        """Add a position for each of the rows."""
        self._append_now()
        self._pending.append(rows)
        self._length += rows.rows.stop - rows.rows.start

    def parts(self, num_entries: int) -> Iterator[FlatLogprobs]:
        """The positions that were read, in order, a few at a time: a part has one of them, or at most `num_entries`
        entries. What was put together before, by a look at an array, is not taken apart again, nor what fits a part."""
        if self._flat.lse.size or self._num_entries() <= num_entries:
            if self._length:
                yield self
            return
        self._append_now()
        part, room = self._empty(), num_entries
        for lists, rows, num_ids in self._pending:
            width, start = self._num_shown(lists, num_ids), rows.start
            while start < rows.stop:
                if part._length and room < width:
                    yield part
                    part, room = self._empty(), num_entries
                stop = min(rows.stop, start + max(1, room // width))
                part.append_rows(LogprobsRows(lists, slice(start, stop), num_ids))
                room -= (stop - start) * width
                start = stop
        if part._length:
            yield part

    def _num_entries(self) -> int:
        """Of what has not been put together, duplicates included."""
        runs = sum((rows.stop - rows.start) * self._num_shown(lists, ids) for lists, rows, ids in self._pending)
        single = (self._num_shown(lists, ids) for rows, count, ids in self._later for lists, _ in rows[:count])
        return runs + sum(single)

    def _num_shown(self, lists: LogprobsLists, num_token_ids: int) -> int:
        return 1 + self._own_topk(lists.num_topk) + num_token_ids

    def _empty(self) -> FlatLogprobs:
        return FlatLogprobs(self._decode, self._num_topk, self._as_logits, self._has_sampled, self._has_entropy)

    def _own_topk(self, widest: int) -> int:
        return widest if self._num_topk < 0 else min(self._num_topk, widest)

    # -- arrays -------------------------------------------------------------------------------------------------

    def _arrays(self) -> FlatArrays:
        if self._pending or self._later:
            parts = [self._flat] if self._flat.lse.size else []
            for _, runs in itertools.groupby(self._pending, key=_layout_of_run):
                parts.append(self._merge(list(runs)))
            for rows, count, num_token_ids in self._later:
                parts += self._gather(rows[:count], num_token_ids)
            self._flat = parts[0] if len(parts) == 1 else FlatArrays(*map(np.concatenate, zip(*parts, strict=True)))
            self._ends = np.cumsum(self._flat.counts)
            self._pending, self._later = [], []
        return self._flat

    def _gather(self, rows: list[LogprobsRow], num_token_ids: int) -> Iterator[FlatArrays]:
        """Single rows, each of another step, as many together as have one layout."""
        for (num_topk, width), alike in _runs_of_one_layout(rows):
            if width > WIDEST_TABLE:
                yield self._merge([LogprobsRows(lists, slice(row, row + 1), num_token_ids) for lists, row in alike])
                continue
            taken = joined([lists.table()[row] for lists, row in alike]).reshape(-1, 4 * width + 2)
            cells = np.empty((4, len(taken), 1 + num_topk + num_token_ids), np.int32)
            for part, own in enumerate(cells):
                own[:] = taken[:, part * width : part * width + own.shape[1]]
            token_ids, logprobs, logits, ranks = cells
            floats = logprobs.view(np.float32), logits.view(np.float32)
            lse, entropy = taken[:, -2:].view(np.float32).T
            yield self._flatten((token_ids, *floats, ranks), num_topk, lse, entropy)

    def _merge(self, runs: list[LogprobsRows]) -> FlatArrays:
        """Runs of one layout."""
        (first, _, num_ids) = runs[0]
        stop = 1 + first.num_topk + num_ids

        def taken(name: str) -> np.ndarray:
            # Steps differ in width by what the neighbours asked for.
            return joined([getattr(lists, name)[rows, :stop] for lists, rows, _ in runs])

        cells = taken("token_ids"), taken("logprobs"), taken("logits"), taken("ranks")
        lse = joined([lists.lse[rows] for lists, rows, _ in runs])
        return self._flatten(cells, first.num_topk, lse, self._entropies(runs) if self._has_entropy else None)

    def _flatten(self, cells: _Cells, num_topk: int, lse: np.ndarray, entropy: np.ndarray | None) -> FlatArrays:
        """The entries to show of P positions: cells of a step's layout with K = `num_topk`, lse and entropy [P]."""
        own = self._own_topk(num_topk)
        if own < num_topk:
            columns = np.r_[: 1 + own, 1 + num_topk : cells[0].shape[1]]
            cells = _each(cells, lambda part: part[:, columns])
        if self._has_sampled:
            keep = ~repeated(cells[0], 1 + own)
        else:
            keep = np.ones(cells[0].shape, dtype=bool)
            keep[:, 0] = False
            keep[:, 1:] = ~repeated(cells[0][:, 1:], own) if own else True
        keeps_all = keep.all()
        counts = np.full(len(keep), keep.shape[1]) if keeps_all else keep.sum(axis=1)
        token_ids, logprobs, logits, ranks = _each(cells, np.ravel if keeps_all else lambda part: part[keep])
        if not self._has_entropy or entropy is None:
            entropy = np.full(len(keep), np.nan, np.float32)
        shown = logits if self._as_logits else logprobs
        return FlatArrays(token_ids, shown, logits, ranks, lse, entropy, counts)

    @staticmethod
    def _entropies(runs: list[LogprobsRows]) -> np.ndarray:
        return joined(
            [
                np.full_like(lists.lse[rows], np.nan) if lists.entropy is None else lists.entropy[rows]
                for lists, rows, _ in runs
            ]
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
    def has_sampled(self) -> bool:
        """Whether each position's first entry is its own token; with max_tokens=0 there is none."""
        return self._has_sampled

    @property
    def lse(self) -> np.ndarray:
        """float32 [P]: log-sum-exp of each position's logits."""
        return self._arrays().lse

    @property
    def entropy(self) -> np.ndarray:
        """float32 [P]: entropy of each position's distribution, in nats; NaN unless `logprob_entropy` asked for it."""
        return self._arrays().entropy

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
        return Readings(*select(self._arrays(), np.asarray(ids, dtype=np.int64)))

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
            float(flat.entropy[index]) if self._has_entropy else None,
        )

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[i] for i in range(self._length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def __getstate__(self) -> dict:
        # The step's arrays hold other requests' rows too, and the decoder a tokenizer: neither should travel.
        flat = self._arrays()
        texts = self.decoded_tokens
        known = dict(zip(flat.token_ids.tolist(), texts, strict=True)) if self._decode is not None else None
        others = {key: value for key, value in vars(self).items() if key not in ("_decode", "_positions")}
        return {**others, "_pending": [], "_flat": flat, "texts": known}

    def __setstate__(self, state: dict) -> None:
        known = state.pop("texts")
        vars(self).update(state, _decode=None if known is None else _KnownTexts(known), _positions={})


class PromptLogprobs(FlatLogprobs):
    """The readings of a prompt: one entry a prompt position, None where nothing was read (the first `num_unread`).

    `prompt_logprobs[i]` holds the prompt's i-th token first (its logprob given the tokens before it), then the top-k,
    then the requested ids. The arrays, and `select`, cover the positions that were read, from the first one on.
    """

    def __init__(self, num_unread: int = 1, **options: Any) -> None:
        """
        Args:
            num_unread: leading positions without a reading; at least 1, as nothing stands before the first token.
            **options: of FlatLogprobs.
        """
        super().__init__(**options)
        self.num_unread = num_unread

    def __len__(self) -> int:
        return self._length + self.num_unread

    def __getitem__(self, index: int | slice) -> Any:
        """A position's entries, or None where nothing was read."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)}")
        index %= len(self)
        return None if index < self.num_unread else super().__getitem__(index - self.num_unread)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _KnownTexts:
    """A decoder over texts that were decoded already."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def __call__(self, token_ids: np.ndarray) -> list[str]:
        return [self._texts[token] for token in token_ids.tolist()]


SampleLogprobs = FlatLogprobs

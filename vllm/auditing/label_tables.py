"""Two models' readings of the same labels, row by row, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from vllm.auditing.statistics import (
    abs_deltas,
    bootstrap,
    kl_rows,
    log_shares,
    margins,
    mcnemar,
    mean_interval,
    quantile,
    reliability_features,
    sizes,
    tv_rows,
    unit_of_rows,
)
from vllm.decisions.evaluation import NUM_BINS, Reliability, reliability

_PART = 4096
_NUM_LISTED = 1000
_NUM_LENGTHS = 4
_READ = ("reference", "candidate")
_RANKS = ("reference_ranks", "candidate_ranks")
_COLUMNS = ("index", *_READ, *_RANKS, "reference_mass", "candidate_mass", "lengths", "gold")


@dataclass(frozen=True)
class LabelTable:
    """Readings of the rows that both models could read.

    Attributes:
        names: [k], of the labels.
        index: int64 [n], places of the rows in the file.
        reference, candidate: float32 [n, k], logprobs over the whole vocabulary; -inf stays.
        reference_ranks, candidate_ranks: int32 [n, k]; 0: a server does not tell.
        reference_mass, candidate_mass: float32 [n], probability of all labels together.
        lengths: int32 [n], tokens of the prompts.
        gold: int32 [n], the known label's column; -1: it is not known.
        groups: by field, int32 [n], places in `group_names`.
        group_names: by field, its values as texts.
        used: bool [n, k], labels that a row has, of questions with different labels; None: all.
    """

    names: list[str]
    index: np.ndarray
    reference: np.ndarray
    candidate: np.ndarray
    reference_ranks: np.ndarray
    candidate_ranks: np.ndarray
    reference_mass: np.ndarray
    candidate_mass: np.ndarray
    lengths: np.ndarray
    gold: np.ndarray
    groups: dict[str, np.ndarray]
    group_names: dict[str, list[str]]
    used: np.ndarray | None = None

    @property
    def flipped(self) -> np.ndarray:
        """bool [n], where the likeliest label is another one."""
        return np.asarray(self.reference.argmax(1) != self.candidate.argmax(1))

    def flips(self) -> Iterator[Flip]:
        """All rows that flip, in their order."""
        places = np.flatnonzero(self.flipped)
        for first in range(0, len(places), _PART):
            part = self.of(places[first : first + _PART])
            read, lead = (part.reference, part.candidate), margins(part.reference)
            shares = [np.exp(log_shares(each)) for each in read]
            for row, index in enumerate(part.index.tolist()):
                best = [self.names[int(each[row].argmax())] for each in read]
                probs = [dict(zip(self.names, each[row].tolist(), strict=True)) for each in shares]
                yield Flip(index, best[0], best[1], probs[0], probs[1], float(lead[row]))

    def of(self, rows: np.ndarray) -> LabelTable:
        """The table of some rows; a mask [n] or places."""
        arrays = {
            name: value[rows] if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        } | {"groups": {name: values[rows] for name, values in self.groups.items()}}
        return LabelTable(**arrays)


def joined(tables: dict[str, LabelTable]) -> LabelTable:
    """One table of the answers to several questions, whose labels are columns of their own numbers; without gold."""
    parts, width = list(tables.values()), max(len(table.names) for table in tables.values())

    def wide(arrays: list[np.ndarray], filler: float) -> np.ndarray:
        return np.concatenate(
            [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=filler) for each in arrays]
        )

    def long(name: str) -> np.ndarray:
        return np.concatenate([getattr(each, name) for each in parts])

    arrays: dict[str, Any] = {name: wide([getattr(each, name) for each in parts], -np.inf) for name in _READ}
    arrays |= {name: wide([getattr(each, name) for each in parts], 0) for name in _RANKS}
    arrays |= {name: long(name) for name in ("index", "reference_mass", "candidate_mass", "lengths")}
    used = wide([np.ones(each.reference.shape, dtype=bool) for each in parts], False)
    gold, names = np.full(len(arrays["index"]), -1, dtype=np.int32), [str(column) for column in range(width)]
    return LabelTable(names=names, **arrays, gold=gold, groups={}, group_names={}, used=used)


class TableBuilder:
    """Collects rows as they are read, in some bytes a label and row."""

    def __init__(self, names: Sequence[str], by: Sequence[str]) -> None:
        self._names = list(names)
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._rows: list[tuple[Any, ...]] = []
        self._values: dict[str, dict[str, int]] = {name: {} for name in by}

    def add(
        self,
        index: int,
        reference: dict[str, Any],
        candidate: dict[str, Any],
        length: int | None,
        gold: int | None,
        fields: dict[str, Any],
    ) -> None:
        """A row with the readings (logprobs, ranks, label_mass) of both; `gold` a column, `fields` of the input."""
        own, other = (_floats(each["logprobs"], self._names) for each in (reference, candidate))
        ranks = (_ranks(each, self._names) for each in (reference, candidate))
        masses = (math.nan if each["label_mass"] is None else each["label_mass"] for each in (reference, candidate))
        places = [values.setdefault(_text(fields.get(name)), len(values)) for name, values in self._values.items()]
        self._rows.append(
            (index, own, other, *ranks, *masses, length or 0, -1 if gold is None else gold, tuple(places))
        )
        if len(self._rows) == _PART:
            self._pack()

    def _pack(self) -> None:
        kinds = (np.int64, *[np.float32] * 2, *[np.int32] * 2, *[np.float32] * 2, *[np.int32] * 3)
        self._parts.append(
            tuple(
                np.asarray(column, dtype=kind)
                for column, kind in zip(zip(*self._rows, strict=True), kinds, strict=True)
            )
        )
        self._rows = []

    def table(self) -> LabelTable | None:
        """All rows; None: there are none."""
        if self._rows:
            self._pack()
        if not self._parts:
            return None
        # A column's parts go once it is whole, so that not all are there twice.
        parts, self._parts = [list(each) for each in zip(*self._parts, strict=True)], []
        *columns, places = [np.concatenate(parts.pop(0)) for _ in range(len(parts))]
        arrays: dict[str, Any] = dict(zip(_COLUMNS, columns, strict=True))
        groups = {name: places[:, i] for i, name in enumerate(self._values)}
        names = {name: list(values) for name, values in self._values.items()}
        return LabelTable(names=self._names, **arrays, groups=groups, group_names=names)


def _floats(values: dict[str, float | None], names: Iterable[str]) -> list[float]:
    found = (values[name] for name in names)
    return [-math.inf if value is None else value for value in found]


def _ranks(readings: dict[str, Any], names: Iterable[str]) -> list[int]:
    return [readings["ranks"].get(name) or 0 for name in names]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Flip:
    """A row whose likeliest label is another one: its place, the labels, the distributions among the labels by label,
    and by how much the reference's label is ahead of its second (nats)."""

    index: int
    reference: str
    candidate: str
    reference_probs: dict[str, float]
    candidate_probs: dict[str, float]
    margin: float


@dataclass(frozen=True)
class GoldStatistics:
    """Measures on the rows whose label is known; expected calibration errors as `vllm decide` measures them.

    Attributes:
        rows: that have a known label.
        accuracy_change, ece_change: candidate's less the reference's.
        lost, won: rows that the reference alone has right, and the candidate alone.
        mcnemar_p: two-sided p-value of McNemar's exact test that both are equally often right.
    """

    rows: int
    reference_accuracy: float
    candidate_accuracy: float
    accuracy_change: float
    accuracy_change_interval: tuple[float, float]
    reference_ece: float
    candidate_ece: float
    ece_change: float
    ece_change_interval: tuple[float, float]
    lost: int
    won: int
    mcnemar_p: float
    reference_reliability: Reliability = field(repr=False)
    candidate_reliability: Reliability = field(repr=False)


@dataclass(frozen=True)
class LabelStatistics:
    """Differences between two models' readings of labels. Intervals are of 95 %, by the bootstrap of `statistics`.

    Attributes:
        rows: compared.
        flips: rows whose likeliest label is another one; `flip_share` of all rows.
        margin_at_flips: nats, the reference's lead at the flips: mean, max (0 of no flips).
        kl_mean, kl_p99: nats, reference to candidate, over the labels' normalised probabilities.
        tv_mean: total variation of these, in [0, 1].
        abs_delta_logprob: nats, over all labels and rows: mean, p99, max.
        delta_by_label: mean of candidate less reference by label.
        abs_delta_by_label: `abs_delta_logprob` by label.
        rank_changes: share of (row, label) pairs whose rank in the vocabulary changed, of those that have one; NaN:
            none has.
        order_changes: share of rows where the labels' order by probability changed.
        reference_mass, candidate_mass: means of the labels' probability together.
        mass_lost: what the candidate's has less of it on average.
        gold: on known labels; None: there are none.
        flipped: the first flips, at most 1,000; `LabelTable.flips` has all.
    """

    rows: int
    flips: int
    flip_share: float
    flip_share_interval: tuple[float, float]
    margin_at_flips: dict[str, float]
    kl_mean: float
    kl_mean_interval: tuple[float, float]
    kl_p99: float
    tv_mean: float
    tv_mean_interval: tuple[float, float]
    abs_delta_logprob: dict[str, float]
    delta_by_label: dict[str, float]
    abs_delta_by_label: dict[str, dict[str, float]]
    rank_changes: float
    order_changes: float
    reference_mass: float
    candidate_mass: float
    mass_lost: float
    gold: GoldStatistics | None
    flipped: list[Flip] = field(repr=False)


@dataclass(frozen=True)
class RowValues:
    """Figures of each row of a table.

    Attributes:
        kl, tv: float64 [n], of the labels' shares, reference to candidate.
        deltas: float64 [n, k], |candidate - reference| of logprobs.
        confidences: float64 [2, n], of the reference and of the candidate, the greatest share; NaN where all logprobs
            are -inf.
        mean_deltas: float64 [k], means of candidate less reference.
        order_changes: rows with another order of labels.
    """

    kl: np.ndarray
    tv: np.ndarray
    deltas: np.ndarray
    confidences: np.ndarray
    mean_deltas: np.ndarray
    order_changes: int


def row_values(table: LabelTable) -> RowValues:
    """Made part by part, so that no more is in memory than what is returned."""
    count, width = table.reference.shape
    kl, tv, deltas, confidences = np.empty(count), np.empty(count), np.empty((count, width)), np.empty((2, count))
    sums, order_changes = np.zeros(width), 0
    for first in range(0, count, _PART):
        rows = slice(first, first + _PART)
        read = table.reference[rows], table.candidate[rows]
        own, other = (log_shares(each) for each in read)
        kl[rows], tv[rows], deltas[rows] = kl_rows(own, other), tv_rows(own, other), abs_deltas(*read)
        confidences[:, rows] = np.exp(own.max(1)), np.exp(other.max(1))
        sums += np.where(read[1] < read[0], -deltas[rows], deltas[rows]).sum(0)
        orders = [np.argsort(-each, axis=1, kind="stable") for each in read]
        order_changes += int((orders[0] != orders[1]).any(1).sum())
    return RowValues(kl, tv, deltas, confidences, sums / count, order_changes)


def label_statistics(table: LabelTable) -> LabelStatistics:
    """Statistics of a table of at least one row."""
    count, flipped, values = len(table.index), table.flipped, row_values(table)
    at_flips = margins(table.reference[flipped])
    masses = float(table.reference_mass.mean(dtype=np.float64)), float(table.candidate_mass.mean(dtype=np.float64))
    return LabelStatistics(
        rows=count,
        flips=int(flipped.sum()),
        flip_share=float(flipped.mean()),
        flip_share_interval=mean_interval(flipped),
        margin_at_flips={
            "mean": float(at_flips.mean()) if len(at_flips) else 0.0,
            "max": float(at_flips.max(initial=0.0)),
        },
        kl_mean=float(values.kl.mean()),
        kl_mean_interval=mean_interval(values.kl),
        kl_p99=quantile(values.kl, 0.99),
        tv_mean=float(values.tv.mean()),
        tv_mean_interval=mean_interval(values.tv),
        abs_delta_logprob=sizes(values.deltas if table.used is None else values.deltas[table.used]),
        delta_by_label=dict(zip(table.names, values.mean_deltas.tolist(), strict=True)),
        abs_delta_by_label={name: sizes(each) for name, each in zip(table.names, values.deltas.T, strict=True)},
        rank_changes=_rank_changes(table),
        order_changes=values.order_changes / count,
        reference_mass=masses[0],
        candidate_mass=masses[1],
        mass_lost=masses[0] - masses[1],
        gold=_gold_statistics(table, values.confidences),
        flipped=list(islice(table.flips(), _NUM_LISTED)),
    )


def _rank_changes(table: LabelTable) -> float:
    known = (table.reference_ranks > 0) & (table.candidate_ranks > 0)
    if table.used is not None:
        known &= table.used
    return float((table.reference_ranks != table.candidate_ranks)[known].mean()) if known.any() else math.nan


def _gold_statistics(table: LabelTable, confidences: np.ndarray) -> GoldStatistics | None:
    known = (table.gold >= 0) & np.isfinite(confidences).all(0)
    if not known.any():
        return None
    gold, shares = table.gold[known], confidences[:, known]
    right = [each[known].argmax(1) == gold for each in (table.reference, table.candidate)]
    before, after = (reliability(*each, NUM_BINS) for each in zip(shares, right, strict=True))
    accuracies = [float(each.mean()) for each in right]
    gaps = [reliability_features(*each, NUM_BINS) for each in zip(shares, right, strict=True)]
    counts = np.bincount(unit_of_rows(len(gold))).astype(np.float64)
    lost, won = int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum())

    def change(sums: np.ndarray) -> np.ndarray:
        errors = [np.abs(sums[:, i * NUM_BINS : (i + 1) * NUM_BINS]).sum(1) for i in (0, 1)]
        return np.asarray((errors[1] - errors[0]) / sums[:, -1])

    return GoldStatistics(
        rows=int(known.sum()),
        reference_accuracy=accuracies[0],
        candidate_accuracy=accuracies[1],
        accuracy_change=accuracies[1] - accuracies[0],
        accuracy_change_interval=mean_interval(right[1].astype(np.float64) - right[0]),
        reference_ece=before.error,
        candidate_ece=after.error,
        ece_change=after.error - before.error,
        ece_change_interval=bootstrap(np.concatenate([*gaps, counts[:, None]], axis=1), change),
        lost=lost,
        won=won,
        mcnemar_p=mcnemar(lost, won),
        reference_reliability=before,
        candidate_reliability=after,
    )


@dataclass(frozen=True)
class GroupStatistics:
    """Some statistics of `LabelStatistics`, of the rows of a group."""

    group: str
    rows: int
    flips: int
    flip_share: float
    kl_mean: float
    tv_mean: float
    abs_delta_logprob: dict[str, float]


def by_length(table: LabelTable) -> list[GroupStatistics]:
    """Groups of rows by the length of their prompts, cut at the quartiles."""
    edges = np.unique(np.quantile(table.lengths, np.linspace(0, 1, _NUM_LENGTHS + 1), method="higher"))
    own = np.searchsorted(edges[1:-1], table.lengths, side="left")
    groups = []
    for place in np.unique(own):
        rows = own == place
        ends = int(table.lengths[rows].min()), int(table.lengths[rows].max())
        groups.append(_group(f"{ends[0]}-{ends[1]} tokens", table.of(rows)))
    return groups


def by_field(table: LabelTable, name: str) -> list[GroupStatistics]:
    """Groups of rows by a field of the input, the largest first."""
    counts = np.bincount(table.groups[name])
    order = np.argsort(-counts, kind="stable")[:_NUM_LISTED]
    return [_group(table.group_names[name][i], table.of(table.groups[name] == i)) for i in order if counts[i]]


def _group(name: str, table: LabelTable) -> GroupStatistics:
    values, flipped = row_values(table), table.flipped
    return GroupStatistics(
        name,
        len(table.index),
        int(flipped.sum()),
        float(flipped.mean()),
        float(values.kl.mean()),
        float(values.tv.mean()),
        {"mean": float(values.deltas.mean()), "p99": quantile(values.deltas, 0.99)},
    )

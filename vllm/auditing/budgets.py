"""The cheapest candidate that keeps a budget, such as flips<=0.5%, with a confidence of 95 %.

A candidate keeps it if the one-sided upper limit of its figure does: of shares that of Clopper and Pearson, of means
that of the bootstrap of Student's t. With m candidates each limit is of confidence 1 - 0.05 / m, so that the named one
is wrong in at most 5 % of audits, however many are tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.auditing.label_tables import LabelTable, row_values
from vllm.auditing.results import BudgetCandidate, BudgetResult, Candidate
from vllm.auditing.statistics import mean_upper_limit, share_upper_limit
from vllm.auditing.text_rows import TextTable
from vllm.exceptions import CliError

CONFIDENCE = 0.95
FIGURES = ("flips", "kl", "tv")
_FORM = re.compile(r"\s*(\w+)\s*<=\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)\s*(%?)\s*")


@dataclass(frozen=True)
class Budget:
    """A limit: of `flips` a share of rows (of texts, of positions whose likeliest token changes), of `kl` nats, of `tv`
    a mean in [0, 1]."""

    figure: str
    limit: float

    @classmethod
    def parse(cls, text: str, kind: str) -> Budget:
        """From FIGURE<=NUMBER or NUMBER%. CliError: it is none, or `kind` of audit has no such figure."""
        match = _FORM.fullmatch(text)
        figures = {"labels": FIGURES, "questions": FIGURES, "text": ("flips", "kl")}.get(kind, ())
        if match is None or match[1] not in figures:
            known = ", ".join(figures) or "none"
            raise CliError(f"--budget {text}: write FIGURE<=NUMBER, as flips<=0.5%; figures of {kind}: {known}")
        limit = float(match[2]) / (100 if match[3] else 1)
        # A figure that is not known has the upper limit inf, which keeps no budget.
        most = math.inf if match[1] == "kl" else 1.0
        if limit >= most:
            raise CliError(f"--budget {text}: {match[1]} must be below {most:g}, got {limit:g}")
        return cls(match[1], limit)


def decide(budget: Budget, candidates: Sequence[Candidate], num_readable: int) -> BudgetResult:
    """Decide which candidates keep the budget; one that cannot read all of the `num_readable` rows that the reference
    could does not."""
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(candidates))
    judged = []
    for each in sorted(candidates, key=_cost):
        value, limit = _figure(budget.figure, each, confidence)
        if each.rows < num_readable:
            limit = math.inf
        judged.append(BudgetCandidate(each.name, value, limit, limit <= budget.limit))
    cheapest = next((each.name for each in judged if each.keeps), None)
    return BudgetResult(budget.figure, budget.limit, CONFIDENCE, judged, cheapest)


def _cost(candidate: Candidate) -> list[float]:
    return [math.inf if math.isnan(each) else each for each in (candidate.seconds, candidate.peak_mib)]


def _figure(figure: str, candidate: Candidate, confidence: float) -> tuple[float, float]:
    """The candidate's figure and its upper limit; inf of no rows."""
    if candidate.text_table is not None:
        return _text_figure(figure, candidate.text_table, confidence)
    tables = list(candidate.label_tables.values())
    if not tables:
        return math.nan, math.inf
    # Answers about one text are not independent of each other: rows are what is drawn.
    index = np.concatenate([table.index for table in tables])
    values = _by_row(np.concatenate([_row_values(figure, table) for table in tables]), index)
    if figure == "flips":
        # Rows with any flip are no fewer than flips among all answers.
        return float(values.mean()), share_upper_limit(int((values > 0).sum()), len(values), confidence)
    return float(values.mean()), mean_upper_limit(values, confidence)


def _text_figure(figure: str, table: TextTable, confidence: float) -> tuple[float, float]:
    """Positions of a text are not independent of each other: texts are what is drawn."""
    # A position whose likeliest token is not known may be a flip.
    values, count = table.kl if figure == "kl" else table.same_top != 1, len(table.index)
    if values is None:
        return math.nan, math.inf
    shares = table.text_sums(values) * count / table.num_positions.sum()
    limit = math.inf if table.num_unread else mean_upper_limit(shares, confidence)
    if figure == "kl":
        return float(values.mean()), limit
    known = table.same_top[table.same_top >= 0]
    value = 1 - float(known.mean()) if len(known) else math.nan
    return value, max(limit, share_upper_limit(0, count, confidence))


def _row_values(figure: str, table: LabelTable) -> np.ndarray:
    if figure == "flips":
        return table.flipped.astype(np.float64)
    values = row_values(table)
    return values.kl if figure == "kl" else values.tv


def _by_row(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    _, places = np.unique(index, return_inverse=True)
    return np.asarray(np.bincount(places, weights=values) / np.bincount(places))

"""The findings of an audit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm.auditing.label_tables import GroupStatistics, LabelStatistics, LabelTable
from vllm.auditing.pooled_rows import EmbeddingStatistics, RankingStatistics
from vllm.auditing.statistics import as_json
from vllm.auditing.text_rows import TextStatistics, TextTable
from vllm.decisions.evaluation import Reliability
from vllm.scoring.files import write_atomically
from vllm.version import __version__

VERSION = 1
"""The version of the JSON."""

_ARRAYS = "array"
_HIDDEN = {_ARRAYS: True}


@dataclass(frozen=True)
class Cost:
    """The cost of a model's readings on this machine.

    Attributes:
        name: as the model was given.
        rows, failed: rows of the file, and those that the model could not read; `failure` is the first error.
        seconds: of reading all rows, without loading_seconds; NaN: it is not known.
        peak_mib: most memory of the model's process; NaN: it is not known.
        readings: the file with all of it.
    """

    name: str
    rows: int
    failed: int
    failure: str | None
    seconds: float
    loading_seconds: float
    peak_mib: float
    readings: str


@dataclass(frozen=True)
class MissingLabels:
    """Rows that a server gave without some of the labels, which are not compared: their other labels alone would be no
    distribution.

    Attributes:
        rows: how many there are.
        labels: of each label, in how many of them it is missing.
        flips: those among them whose likeliest label is there, and another one than the reference's.
    """

    rows: int
    labels: dict[str, int]
    flips: int


@dataclass(frozen=True)
class Candidate(Cost):
    """A candidate's cost, and how far its readings are from the reference's; `rows` are those that both could read.

    Attributes:
        missing: rows without some of the labels, of a server that gives its likeliest tokens alone; None: there are
            none.
        labels: of all labels; with questions, of all answers together. None: none were asked, or no row has both.
        questions: by question.
        text, ranking, embedding: of whole texts, of rerankers, of embedders; None: they were not asked.
        by_length: groups by the length of the prompts.
        by: groups by field.
        label_tables: the readings themselves; by question, "" of labels. Not part of the JSON.
        text_table: the same of texts.
    """

    missing: MissingLabels | None = None
    labels: LabelStatistics | None = None
    questions: dict[str, LabelStatistics] = field(default_factory=dict)
    text: TextStatistics | None = None
    ranking: RankingStatistics | None = None
    embedding: EmbeddingStatistics | None = None
    by_length: list[GroupStatistics] = field(default_factory=list)
    by: dict[str, list[GroupStatistics]] = field(default_factory=dict)
    label_tables: dict[str, LabelTable] = field(default_factory=dict, repr=False, metadata=_HIDDEN)
    text_table: TextTable | None = field(default=None, repr=False, metadata=_HIDDEN)


@dataclass(frozen=True)
class BudgetCandidate:
    """A candidate's figure, the upper limit of it, and whether that keeps the budget."""

    name: str
    value: float
    upper_limit: float
    keeps: bool


@dataclass(frozen=True)
class BudgetResult:
    """
    Attributes:
        figure, limit: of the budget.
        candidates: in order of measured cost, the cheapest first: seconds, then memory.
        cheapest: the first that keeps the budget; None: none does.
    """

    figure: str
    limit: float
    confidence: float
    candidates: list[BudgetCandidate]
    cheapest: str | None


@dataclass(frozen=True)
class Audit:
    """
    Attributes:
        rows: name of the file.
        kind: labels, questions, text, rerank or embed.
        reference: its cost.
        candidates: in the order given.
        budget: what keeps it; None: there is none.
    """

    rows: str
    kind: str
    reference: Cost
    candidates: list[Candidate]
    budget: BudgetResult | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON, whose form `version` tells; null is what is not known or not finite."""
        own = {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}
        found: dict[str, Any] = as_json({"version": VERSION, "vllm": __version__, **own})
        return found

    def save(self, path: str | Path) -> None:
        """Write the JSON; CliError: it cannot be written."""
        write_atomically(Path(path), f"{json.dumps(self.to_dict(), ensure_ascii=False, indent=1)}\n".encode())


def _plain(value: Any) -> Any:
    if isinstance(value, Reliability):
        used = np.flatnonzero(value.counts)
        names = ("counts", "accuracies", "confidences")
        return [{"from": value.edges[i], **{name: getattr(value, name)[i] for name in names}} for i in used]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _plain(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if not each.metadata.get(_ARRAYS)
        }
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value

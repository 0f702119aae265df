"""How good probabilities are, measured on known answers.

Of n rows with probabilities p over k labels, y the known label as 0 and 1, and c the first label of greatest p:

- accuracy: share of rows whose c is the known label.
- macro F1: mean of 2 TP / (2 TP + FP + FN) over the labels that are known or predicted in any row.
- Brier score: mean over rows of the sum over labels of (p - y)^2, in [0, 2] (Brier 1950, "Verification of Forecasts
  Expressed in Terms of Probability"). With two labels it is twice the form that counts one of them.
- log loss: mean over rows of -log p(known label), in nats; p is raised to 2.2e-16 where it is smaller.
- expected calibration error: rows are put in bins of equal width by p(c), each open on the left; the mean over rows of
  |accuracy - mean p(c)| of their bin (Guo et al. 2017, "On Calibration of Modern Neural Networks").
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_integer

NUM_BINS = 15
"""Bins of the expected calibration error, as in Guo et al."""

SMALLEST = float(np.finfo(np.float64).eps)
"""Probabilities count as at least this where their logarithm is taken."""

_MAX_BINS = 10_000
# How far a row's probabilities may sum from 1: readings are float32, and files have rounded values.
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Reliability:
    """Rows by the probability of their prediction; arrays [bins], lowest bin first.

    Attributes:
        edges: float64 [bins + 1], from 0 to 1.
        counts: int64, rows of each bin.
        accuracies, confidences: float64, means of the bin's rows; NaN where it has none.
    """

    edges: np.ndarray
    counts: np.ndarray
    accuracies: np.ndarray
    confidences: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error, in [0, 1]."""
        gaps = np.abs(np.nan_to_num(self.accuracies) - np.nan_to_num(self.confidences))
        return float(gaps @ self.counts / self.counts.sum())


@dataclass(frozen=True)
class Evaluation:
    """Measures of the module's formulas.

    Attributes:
        labels: [k], in the order of the probabilities' columns.
        num_rows: n.
        confusion: int64 [k, k], rows counted by known label (first axis) and predicted label.
        reliability: what `ece` is the sum of.
    """

    labels: list[str]
    num_rows: int
    accuracy: float
    macro_f1: float
    brier: float
    log_loss: float
    confusion: np.ndarray
    reliability: Reliability

    @property
    def ece(self) -> float:
        """Expected calibration error, in [0, 1]."""
        return self.reliability.error

    def to_dict(self) -> dict[str, Any]:
        """As JSON; empty bins are left out."""
        names = ("num_rows", "accuracy", "macro_f1", "brier", "log_loss", "ece", "labels")
        bins = self.reliability
        used = np.flatnonzero(bins.counts)
        return {name: getattr(self, name) for name in names} | {
            "confusion": self.confusion.tolist(),
            "bins": [
                {
                    "from": float(bins.edges[i]),
                    "to": float(bins.edges[i + 1]),
                    "num_rows": int(bins.counts[i]),
                    "accuracy": float(bins.accuracies[i]),
                    "confidence": float(bins.confidences[i]),
                }
                for i in used
            ],
        }


def evaluate(
    probabilities: Any, gold: Sequence[int] | np.ndarray, labels: Sequence[str], num_bins: int = NUM_BINS
) -> Evaluation:
    """Measure probabilities on known answers.

    Args:
        probabilities: [n, k]; every row sums to 1.
        gold: [n], each row's known answer as an index into `labels`.
        labels: k names, for the report.
        num_bins: of the expected calibration error.

    Raises:
        VLLMValidationError: no rows, other shapes, values that are no probabilities, an unknown label; names which.
    """
    shares, known = check_table(probabilities, gold, len(labels))
    num_bins = check_integer("num_bins", num_bins, 1, _MAX_BINS)
    num_rows = len(known)
    predicted = shares.argmax(1)
    confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(confusion, (known, predicted), 1)
    rows = np.arange(num_rows)
    squares = (shares**2).sum(1) - 2 * shares[rows, known] + 1
    return Evaluation(
        labels=list(labels),
        num_rows=num_rows,
        accuracy=float((predicted == known).mean()),
        macro_f1=_macro_f1(confusion),
        brier=float(squares.mean()),
        log_loss=float(-np.log(shares[rows, known].clip(SMALLEST, 1.0)).mean()),
        confusion=confusion,
        reliability=reliability(shares[rows, predicted], predicted == known, num_bins),
    )


def check_table(probabilities: Any, gold: Any, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, float64 [n, k], and known answers, int64 [n]; see `evaluate`."""
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim != 2 or shares.shape[1] != num_labels or not len(shares):
        message = f"probabilities must be of shape [rows, {num_labels}] with at least one row, got {list(shares.shape)}"
        raise VLLMValidationError(message, "probabilities", list(shares.shape))
    wrong = np.flatnonzero(~((shares >= 0).all(1) & (np.abs(shares.sum(1) - 1) <= _SUM_TOLERANCE)))
    if len(wrong):
        row = int(wrong[0])
        message = f"probabilities[{row}] must be non-negative and sum to 1, got {shares[row].tolist()}"
        raise VLLMValidationError(message, "probabilities", row)
    known = [_index(row, value, num_labels) for row, value in enumerate(gold)]
    if len(known) != len(shares):
        message = f"gold must have {len(shares)} entries, as probabilities has rows, got {len(known)}"
        raise VLLMValidationError(message, "gold", len(known))
    return shares, np.asarray(known, dtype=np.int64)


def _index(row: int, value: Any, num_labels: int) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        index = -1
    if not 0 <= index < num_labels:
        message = f"gold[{row}] must be an index of one of {num_labels} labels, got {value!r}"
        raise VLLMValidationError(message, "gold", value)
    return index


def _macro_f1(confusion: np.ndarray) -> float:
    hits = np.diag(confusion)
    occurrences = confusion.sum(0) + confusion.sum(1)  # 2 TP + FP + FN
    seen = occurrences > 0
    return float((2 * hits[seen] / occurrences[seen]).mean())


def reliability(confidences: np.ndarray, correct: np.ndarray, num_bins: int) -> Reliability:
    """Calibration by bins, from predictions' probabilities, float [n], and whether they are right, bool [n]."""
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    own = np.searchsorted(edges[1:-1], confidences, side="left")
    counts = np.bincount(own, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        accuracies, means = (
            np.bincount(own, weights=values, minlength=num_bins) / counts for values in (correct, confidences)
        )
    return Reliability(edges, counts, accuracies, means)

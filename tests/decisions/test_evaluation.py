"""Measures of probabilities, against values worked out by hand and definitions written out row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm.decisions.evaluation import evaluate
from vllm.exceptions import VLLMValidationError

# Predicted 0, 0, 1, 2, 2 with 0.7, 0.6, 0.5, 0.8 and 0.9.
SHARES = [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [0.1, 0.1, 0.8], [0.05, 0.05, 0.9]]
GOLD = [0, 1, 1, 2, 0]


def test_values_worked_out_by_hand():
    found = evaluate(SHARES, GOLD, ["a", "b", "c"], num_bins=10)
    assert found.num_rows == 5
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.confusion.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 1]]
    # F1 of each: 2/(2+1+1), 2/(2+1), 2/(2+1).
    assert found.macro_f1 == pytest.approx((1 / 2 + 2 / 3 + 2 / 3) / 3)
    squares = [0.09 + 0.04 + 0.01, 0.36 + 0.49 + 0.01, 0.09 + 0.25 + 0.04, 0.01 + 0.01 + 0.04, 0.9025 + 0.0025 + 0.81]
    assert found.brier == pytest.approx(sum(squares) / 5)
    assert found.log_loss == pytest.approx(-sum(map(math.log, (0.7, 0.3, 0.5, 0.8, 0.05))) / 5)
    # A row a bin: 0.7 right, 0.6 wrong, 0.5 right, 0.8 right, 0.9 wrong.
    assert found.ece == pytest.approx((0.3 + 0.6 + 0.5 + 0.2 + 0.9) / 5)


def test_a_value_on_an_edge_is_in_the_lower_bin():
    bins = evaluate([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]], [0, 1, 0], ["a", "b"], num_bins=4).reliability
    assert bins.counts.tolist() == [0, 1, 1, 1]
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert np.isnan(bins.accuracies[0]) and bins.accuracies[1:].tolist() == [1, 0, 1]


@pytest.mark.parametrize("num_labels", [2, 5])
def test_the_definitions_row_by_row(num_labels):
    generator = np.random.default_rng(num_labels)
    shares = generator.dirichlet(np.full(num_labels, 0.4), 300)
    gold = generator.integers(0, num_labels, 300)
    found = evaluate(shares, gold, [str(i) for i in range(num_labels)])
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, known in zip(shares.tolist(), gold, strict=True):
        best = row.index(max(row))
        bins.setdefault(math.ceil(max(row) * 15) - 1, []).append((max(row), best == known))
    ece = sum(abs(sum(own) - sum(right)) for own, right in (zip(*rows, strict=True) for rows in bins.values())) / 300
    assert found.ece == pytest.approx(ece)
    assert found.reliability.counts[max(bins)] == len(bins[max(bins)])
    known = np.eye(num_labels)[gold]
    assert found.brier == pytest.approx(((shares - known) ** 2).sum() / 300)


def test_a_label_that_nobody_saw_is_no_part_of_macro_f1():
    assert evaluate([[0.9, 0.1, 0.0], [0.1, 0.9, 0.0]], [0, 1], ["a", "b", "c"]).macro_f1 == 1.0


def test_a_known_answer_of_no_probability_has_a_finite_loss():
    assert evaluate([[0.0, 1.0]], [0], ["a", "b"]).log_loss == pytest.approx(52 * math.log(2))


def test_as_json():
    fields = evaluate(SHARES, GOLD, ["a", "b", "c"], num_bins=10).to_dict()
    assert fields["labels"] == ["a", "b", "c"] and fields["confusion"][0] == [1, 0, 1]
    assert sum(own["num_rows"] for own in fields["bins"]) == 5
    assert fields["ece"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shares", "gold", "field", "message"),
    [
        ([], [], "probabilities", "at least one row"),
        ([[0.5, 0.5]], [0], "probabilities", r"\[rows, 3\]"),
        ([[0.5, 0.5, 0.5]], [0], "probabilities", r"probabilities\[0\] must be non-negative and sum to 1"),
        ([[1.5, -0.5, 0.0]], [0], "probabilities", r"probabilities\[0\]"),
        ([[math.nan, 0.5, 0.5]], [0], "probabilities", r"probabilities\[0\]"),
        ([[0.5, 0.5, 0.0]], [3], "gold", r"gold\[0\] must be an index of one of 3 labels, got 3"),
        ([[0.5, 0.5, 0.0]], [-1], "gold", "got -1"),
        ([[0.5, 0.5, 0.0]], ["a"], "gold", "got 'a'"),
        ([[0.5, 0.5, 0.0]], [0, 1], "gold", "gold must have 1 entries"),
    ],
)
def test_what_cannot_be_measured_is_named(shares, gold, field, message):
    with pytest.raises(VLLMValidationError, match=message) as error:
        evaluate(shares, gold, ["a", "b", "c"])
    assert error.value.parameter == field

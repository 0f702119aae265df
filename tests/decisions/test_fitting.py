"""Fitted scalings: the truth comes back, and no other scaling has a smaller loss."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.decisions.calibration import Scaling
from vllm.decisions.evaluation import evaluate
from vllm.decisions.fitting import fit_scaling, measure_on_halves

KEYS = ["a", "b", "c"]
TRUE = Scaling(2.5, {"a": 0.8, "b": -0.5, "c": -0.3})


def drawn(num_rows, scaling=TRUE, seed=0):
    """Shares, and answers drawn by what the scaling makes of them."""
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet([0.3, 0.5, 0.4], num_rows)
    cumulated = scaling.apply(shares, KEYS).cumsum(1)
    return shares, (generator.random((num_rows, 1)) > cumulated).sum(1).clip(0, 2)


def loss(scaling, shares, gold):
    return evaluate(scaling.apply(shares, KEYS), gold, KEYS).log_loss


def test_the_scaling_that_answers_were_drawn_by_is_found():
    found = fit_scaling(*drawn(40_000), KEYS)
    assert found.temperature == pytest.approx(2.5, rel=0.05)  # three standard errors of 40,000 rows
    assert found.bias == pytest.approx(dict(TRUE.bias), abs=0.06)


@pytest.mark.parametrize("with_bias", [True, False])
def test_no_neighbour_has_a_smaller_loss(with_bias):
    shares, gold = drawn(2000, seed=1)
    found = fit_scaling(shares, gold, KEYS, with_bias=with_bias)
    assert bool(found.bias) == with_bias
    least = loss(found, shares, gold)
    for factor in (0.98, 1.02):
        assert loss(Scaling(found.temperature * factor, found.bias), shares, gold) > least
        for key in found.bias:
            moved = {**found.bias, key: found.bias[key] + factor - 1}
            assert loss(Scaling(found.temperature, moved), shares, gold) > least


def test_calibrated_probabilities_stay_as_they_are():
    found = fit_scaling(*drawn(40_000, Scaling(), seed=2), KEYS)
    assert found.temperature == pytest.approx(1.0, abs=0.05)
    assert found.bias == pytest.approx(dict.fromkeys(KEYS, 0.0), abs=0.06)


@pytest.mark.parametrize(
    ("shares", "gold"),
    [
        ([[0.9, 0.1, 0.0]] * 4, [0] * 4),  # all right, one label never, one without any probability
        ([[0.9, 0.1, 0.0]] * 4, [2] * 4),
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [1, 0]),  # always wrong: the loss is least at no weight at all
        ([[1 / 3, 1 / 3, 1 / 3]], [1]),
    ],
)
def test_few_or_extreme_rows_have_a_finite_fit_no_worse_than_none(shares, gold):
    shares = np.asarray(shares)
    found = fit_scaling(shares, gold, KEYS)
    assert 0 < found.temperature <= 1000
    assert np.isfinite(list(found.bias.values())).all()
    # The file that holds it can be read back.
    assert loss(found, shares, gold) <= loss(Scaling(), shares, gold) + 1e-9


def test_halves_show_what_a_fit_does_for_other_rows():
    shares, gold = drawn(4000, seed=3)
    found = measure_on_halves(shares, gold, KEYS)
    assert found.before.num_rows == found.after.num_rows == 2000
    assert found.after.ece < 0.5 * found.before.ece
    assert found.after.log_loss < found.before.log_loss


def test_one_row_has_no_halves():
    with pytest.raises(ValueError, match="at least 2 rows"):
        measure_on_halves([[0.2, 0.3, 0.5]], [0], KEYS)

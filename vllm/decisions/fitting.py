"""Scalings that fit known answers best.

With w = 1 / temperature and biases b, the log loss of softmax(w log p + b) is convex in (w, b). Newton's method finds
its minimum together with that of a weak Gaussian prior around w = 1 and b = 0, of standard deviation 10 and the weight
of one row: without it a label that no row has, or rows that are all right, would have no finite minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.decisions.calibration import MAX_BIAS, MAX_TEMPERATURE, Scaling
from vllm.decisions.evaluation import SMALLEST, Evaluation, check_table, evaluate
from vllm.exceptions import VLLMValidationError

_PRIOR_DEVIATION = 10.0
_MAX_STEPS = 200
_MIN_DECREASE = 1e-14
# Armijo's condition.
_SUFFICIENT, _SHRINK, _MIN_STEP = 1e-4, 0.5, 1e-12


@dataclass(frozen=True)
class HeldOut:
    """Measures of one half of the rows, as they are and by a scaling fitted on the other half."""

    before: Evaluation
    after: Evaluation


def fit_scaling(
    probabilities: Any, gold: Sequence[int] | np.ndarray, keys: Sequence[str], *, with_bias: bool = True
) -> Scaling:
    """The temperature, and with `with_bias` a bias an option, of the least log loss.

    Args:
        probabilities: [n, k], the options' shares before calibration.
        gold: [n], the known options' indices.
        keys: k names of the options (`Option.key`).

    Raises:
        VLLMValidationError: as `evaluation.evaluate`.
    """
    shares, known = check_table(probabilities, gold, len(keys))
    logs = np.log(shares.clip(SMALLEST, 1.0))
    free = np.full(1 + len(keys), with_bias)
    free[0] = True
    start = np.zeros(1 + len(keys))
    start[0] = 1.0
    found = _minimise(logs, known, start, free)
    if found[0] < 1 / MAX_TEMPERATURE:
        # Probabilities that say nothing, or the contrary: the loss is least at the limit.
        start[0], free[0] = 1 / MAX_TEMPERATURE, False
        found = _minimise(logs, known, start, free)
    bias = (found[1:] - found[1:].mean()).clip(-MAX_BIAS, MAX_BIAS)
    return Scaling(1 / float(found[0]), dict(zip(keys, bias.tolist(), strict=True)) if with_bias else {})


def measure_on_halves(probabilities: Any, gold: Sequence[int] | np.ndarray, keys: Sequence[str]) -> HeldOut:
    """Fit on one half of the rows, drawn by a fixed seed, and measure on the other.

    Raises:
        VLLMValidationError: as `fit_scaling`, or fewer than two rows.
    """
    shares, known = check_table(probabilities, gold, len(keys))
    if len(known) < 2:
        raise VLLMValidationError("a fit on one half and a test on the other need at least 2 rows", "gold", len(known))
    order = np.random.default_rng(0).permutation(len(known))
    fitted, tested = order[: len(order) // 2], order[len(order) // 2 :]
    scaling = fit_scaling(shares[fitted], known[fitted], keys)
    raw = shares[tested]
    before, after = (evaluate(table, known[tested], keys) for table in (raw, scaling.apply(raw, keys)))
    return HeldOut(before, after)


def _minimise(logs: np.ndarray, gold: np.ndarray, start: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The minimum over the free parameters of [1 + k], by Newton's method with backtracking."""
    point = start.copy()
    places = np.flatnonzero(free)
    if not len(places):
        return point
    value, gradient, hessian = _loss(logs, gold, point)
    for _ in range(_MAX_STEPS):
        direction = -np.linalg.solve(hessian[np.ix_(places, places)], gradient[places])
        slope = float(gradient[places] @ direction)
        if -slope < _MIN_DECREASE:
            break
        step = 1.0
        while step >= _MIN_STEP:
            trial = point.copy()
            trial[places] += step * direction
            found = _loss(logs, gold, trial)
            if found[0] <= value + _SUFFICIENT * step * slope:
                break
            step *= _SHRINK
        else:
            break  # as near as float64 comes
        point, (value, gradient, hessian) = trial, found
    return point


def _loss(logs: np.ndarray, gold: np.ndarray, point: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Log loss and prior at (w, b): value, gradient [1 + k], Hessian [1 + k, 1 + k]."""
    num_rows = len(gold)
    rows = np.arange(num_rows)
    logits = point[0] * logs + point[1:]
    top = logits.max(1, keepdims=True)
    weights = np.exp(logits - top)
    sums = weights.sum(1, keepdims=True)
    shares = weights / sums
    value = float((np.log(sums[:, 0]) + top[:, 0] - logits[rows, gold]).mean())
    excess = shares.copy()
    excess[rows, gold] -= 1
    gradient = np.concatenate([[(excess * logs).sum() / num_rows], excess.mean(0)])
    means = (shares * logs).sum(1, keepdims=True)
    spread = shares * (logs - means)
    hessian = np.empty((len(point), len(point)))
    hessian[0, 0] = (spread * logs).sum() / num_rows
    hessian[0, 1:] = hessian[1:, 0] = spread.mean(0)
    hessian[1:, 1:] = np.diag(shares.mean(0)) - shares.T @ shares / num_rows
    weight = 1 / (_PRIOR_DEVIATION**2 * num_rows)
    away = point - np.eye(1, len(point))[0]
    return value + weight * float(away @ away) / 2, gradient + weight * away, hessian + weight * np.eye(len(point))

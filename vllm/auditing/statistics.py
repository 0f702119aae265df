"""Statistics of audits, in float64.

Intervals of a share, a mean or a calibration error are those of the percentile bootstrap: rows are drawn with
replacement, NUM_DRAWS times, by NumPy's generator of a fixed seed, and the 2.5th and 97.5th percentiles are taken. Of
more than MAX_UNITS rows, whole groups of rows are drawn, MAX_UNITS of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_DRAWS = 1000
MAX_UNITS = 10_000
_PART = 50
_SEED = 20261128


def log_shares(logprobs: np.ndarray) -> np.ndarray:
    """Logarithms of shares among the columns, float64 [n, k], of logprobs [n, k]; NaN where all are -inf."""
    values = logprobs.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = values - values.max(1, keepdims=True)
        return values - np.log(np.exp(values).sum(1, keepdims=True))


def kl_rows(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """KL(reference || candidate) of rows, nats, float64 [n], of logarithms of distributions [n, k]; NaN where either is
    none."""
    shares = np.exp(reference)
    with np.errstate(invalid="ignore"):
        terms = shares * (reference - candidate)
    return np.maximum(np.where(shares == 0, 0.0, terms).sum(1), 0.0)


def tv_rows(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Total variation of rows, in [0, 1], float64 [n]; as `kl_rows`."""
    return np.abs(np.exp(reference) - np.exp(candidate)).sum(1) / 2


def abs_deltas(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """|candidate - reference| of logprobs, float64; 0 where both are -inf."""
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(b - a))


def sizes(deltas: np.ndarray) -> dict[str, float]:
    """Mean, 99th percentile and maximum."""
    return {"mean": float(deltas.mean()), "p99": quantile(deltas, 0.99), "max": float(deltas.max())}


def quantile(values: np.ndarray, level: float) -> float:
    """Interpolated linearly; an infinity where that reaches one."""
    with np.errstate(invalid="ignore"):
        found = float(np.quantile(values, level))
    return math.inf if math.isnan(found) and not np.isnan(values).any() else found


def margins(logprobs: np.ndarray) -> np.ndarray:
    """The best column's logprob above the second best's, float64 [n]; inf of a single column."""
    if logprobs.shape[1] < 2:
        return np.full(len(logprobs), np.inf)
    best = np.sort(logprobs.astype(np.float64), axis=1)
    return best[:, -1] - best[:, -2]


def bootstrap(features: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
    """The percentile interval of a function of the rows' sums.

    Args:
        features: float64 [n, d], whose sums over drawn rows the statistic is made from.
        statistic: from sums [b, d] to values [b].
    """
    units = _units(features)
    generator, values = np.random.default_rng(_SEED), []
    for _ in range(0, NUM_DRAWS, _PART):
        drawn = generator.integers(0, len(units), (_PART, len(units)))
        counts = np.stack([np.bincount(row, minlength=len(units)) for row in drawn])
        values.append(statistic(counts.astype(np.float64) @ units))
    low, high = np.quantile(np.concatenate(values), [0.025, 0.975])
    return float(low), float(high)


def _units(features: np.ndarray) -> np.ndarray:
    """At most MAX_UNITS rows: `features`, or sums of groups of them in a random order."""
    if len(features) <= MAX_UNITS:
        return features
    groups = unit_of_rows(len(features))
    return np.stack([np.bincount(groups, weights=column, minlength=MAX_UNITS) for column in features.T], axis=1)


def unit_of_rows(count: int) -> np.ndarray:
    """int64 [count], the place of each row's group, of MAX_UNITS groups in a random order; of no more rows, its own."""
    if count <= MAX_UNITS:
        return np.arange(count)
    found = np.empty(count, dtype=np.int64)
    edges = np.linspace(0, count, MAX_UNITS + 1).astype(np.int64)
    found[np.random.default_rng(_SEED).permutation(count)] = np.repeat(np.arange(MAX_UNITS), np.diff(edges))
    return found


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The bootstrap's interval of a mean."""
    if not len(values) or not np.isfinite(values).all():
        return math.nan, math.nan
    features = np.stack([values.astype(np.float64), np.ones(len(values))], axis=1)
    return bootstrap(features, lambda sums: sums[:, 0] / sums[:, 1])


def reliability_features(confidences: np.ndarray, correct: np.ndarray, num_bins: int) -> np.ndarray:
    """float64 [units, num_bins], sums over each unit's rows: a row's hit minus its confidence, in the column of its bin
    of confidence. A million rows of bins would need more memory than all their readings."""
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    own = np.searchsorted(edges[1:-1], confidences, side="left")
    cells, size = unit_of_rows(len(own)) * num_bins + own, min(len(own), MAX_UNITS) * num_bins
    return np.bincount(cells, weights=correct.astype(np.float64) - confidences, minlength=size).reshape(-1, num_bins)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's exact test: of rows that one of two models has right, `lost` are those that
    the first alone has, `won` those of the second alone."""
    total = lost + won
    return 1.0 if not total else min(1.0, 2.0 * binomial_cdf(min(lost, won), total, 0.5))


def binomial_cdf(count: int, total: int, probability: float) -> float:
    """P(X <= count), X the successes among `total`."""
    if count >= total or probability <= 0:
        return 1.0
    if probability >= 1 or count < 0:
        return 0.0
    steps = np.arange(count, dtype=np.float64)
    ratios = np.log(total - steps) - np.log(steps + 1) + math.log(probability) - math.log1p(-probability)
    terms = total * math.log1p(-probability) + np.concatenate([[0.0], np.cumsum(ratios)])
    peak = float(terms.max())
    return min(1.0, math.exp(peak + math.log(float(np.exp(terms - peak).sum()))))


def share_upper_limit(count: int, total: int, confidence: float) -> float:
    """The one-sided upper limit of Clopper and Pearson of a share, of which `count` of `total` were seen."""
    if count >= total:
        return 1.0
    low, high = count / total, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if binomial_cdf(count, total, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def mean_upper_limit(values: np.ndarray, confidence: float) -> float:
    """The one-sided upper limit of a mean, by the bootstrap of Student's t: means of drawn rows, less the mean, over
    their own standard errors, so that a tail on the right widens it. inf of fewer than ten values, or if one is."""
    values = values.astype(np.float64)
    if len(values) < 10 or not np.isfinite(values).all():
        return math.inf
    if values.min() == values.max():
        return float(values[0])
    units = _units(np.stack([values, np.ones(len(values))], axis=1))
    units = units[:, 0] / units[:, 1]
    count, generator, found = len(units), np.random.default_rng(_SEED), []
    mean, error = float(values.mean()), float(units.std(ddof=1)) / math.sqrt(count)
    for _ in range(0, 2 * NUM_DRAWS, _PART):
        drawn = units[generator.integers(0, count, (_PART, count))]
        errors = drawn.std(1, ddof=1) / math.sqrt(count)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append((drawn.mean(1) - units.mean()) / errors)
    ratios = np.concatenate(found)
    # Drawn rows that are all alike have no error: such a mean may be as far off as any.
    ratios = np.where(np.isnan(ratios), -np.inf, ratios)
    lowest = float(np.quantile(ratios, 1 - confidence, method="lower"))
    return mean - lowest * error


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b of two lists of scores; NaN where one has no two different scores."""
    _, a = np.unique(first, return_inverse=True)
    _, b = np.unique(second, return_inverse=True)
    pairs = len(a) * (len(a) - 1) // 2
    ties_a, ties_b = _num_ties(a), _num_ties(b)
    ties_both = _num_ties(np.unique(np.stack([a, b]), axis=1, return_inverse=True)[1].reshape(-1))
    untied_a, untied_b = pairs - ties_a, pairs - ties_b
    if not untied_a or not untied_b:
        return math.nan
    discordant = _num_inversions(b[np.lexsort((b, a))])
    return (pairs - ties_a - ties_b + ties_both - 2 * discordant) / math.sqrt(untied_a * untied_b)


def _num_ties(ranks: np.ndarray) -> int:
    counts = np.bincount(ranks)
    return int((counts * (counts - 1) // 2).sum())


def _num_inversions(ranks: np.ndarray) -> int:
    """Pairs whose first number is the greater one. They differ first in some bit, and are alike above it."""
    total = 0
    for bit in range(int(ranks.max()).bit_length()):
        order = np.argsort(ranks >> bit >> 1, kind="stable")
        above, ones = (ranks >> bit >> 1)[order], (ranks >> bit & 1)[order]
        before = np.cumsum(ones) - ones
        before -= before[np.searchsorted(above, above)]
        total += int(before[ones == 0].sum())
    return total


def ndcg(reference: np.ndarray, candidate: np.ndarray, depth: int = 10) -> float:
    """nDCG at `depth` of the candidate's order, where the reference's first document has gain `depth`, its second one
    less, and so on to 0."""
    gains = np.zeros(len(reference))
    best = np.argsort(-np.asarray(reference), kind="stable")[:depth]
    gains[best] = np.arange(depth, depth - len(best), -1)
    discounts = 1 / np.log2(np.arange(2, min(depth, len(gains)) + 2))
    order = np.argsort(-np.asarray(candidate), kind="stable")[:depth]
    return float(gains[order] @ discounts / (gains[best] @ discounts))


def as_json(value: Any) -> Any:
    """The value with null for what JSON does not have."""
    if isinstance(value, dict):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value

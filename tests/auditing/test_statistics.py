"""The statistics of audits, against SciPy's where it has them, and float64 by hand, on planted distributions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from vllm.auditing.budgets import Budget, decide
from vllm.auditing.label_tables import LabelTable, TableBuilder, by_field, by_length, joined, label_statistics
from vllm.auditing.report import audit_table
from vllm.auditing.results import Audit, Candidate, Cost
from vllm.auditing.statistics import (
    MAX_UNITS,
    as_json,
    binomial_cdf,
    kendall_tau,
    kl_rows,
    log_shares,
    mcnemar,
    mean_interval,
    mean_upper_limit,
    ndcg,
    reliability_features,
    share_upper_limit,
    tv_rows,
    unit_of_rows,
)
from vllm.exceptions import CliError

NAMES = [" a", " b", " c"]


def _table(reference: np.ndarray, candidate: np.ndarray, gold: np.ndarray | None = None, **fields: list) -> LabelTable:
    """Ranks are those among the labels."""
    names, builder = [f" {i}" for i in range(reference.shape[1])], None
    builder = TableBuilder(names, list(fields))
    for row, pair in enumerate(zip(reference, candidate, strict=True)):
        readings = [
            {
                "logprobs": dict(zip(names, map(float, each), strict=True)),
                "ranks": dict(zip(names, (1 + (each[None] > each[:, None]).sum(1)).tolist(), strict=True)),
                "label_mass": float(np.exp(each).sum()),
            }
            for each in pair
        ]
        own = None if gold is None else int(gold[row])
        builder.add(
            row, readings[0], readings[1], 10 + row, own, {name: values[row] for name, values in fields.items()}
        )
    table = builder.table()
    assert table is not None
    return table


def _random(count: int, width: int = 3, noise: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs, float32 [count, width], of a vocabulary of 20, and the same with normal noise of the logits."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, 20)) * 2
    others = logits + generator.normal(size=logits.shape) * noise

    def read(values: np.ndarray) -> np.ndarray:
        return (values - np.log(np.exp(values).sum(1, keepdims=True)))[:, :width].astype(np.float32)

    return read(logits), read(others)


def test_figures_equal_their_definitions_in_float64():
    reference, candidate = _random(500)
    found = label_statistics(_table(reference, candidate))
    own, other = reference.astype(np.float64), candidate.astype(np.float64)
    p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (own, other))
    flips = own.argmax(1) != other.argmax(1)
    deltas = np.abs(other - own)
    assert found.rows == 500 and found.flips == flips.sum() > 0
    assert found.kl_mean == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-9)
    assert found.tv_mean == pytest.approx(np.abs(p - q).sum(1).mean() / 2, rel=1e-9)
    assert found.abs_delta_logprob["mean"] == pytest.approx(deltas.mean(), rel=1e-12)
    assert found.abs_delta_logprob["p99"] == pytest.approx(np.quantile(deltas, 0.99), rel=1e-12)
    assert found.mass_lost == pytest.approx((np.exp(own).sum(1) - np.exp(other).sum(1)).mean(), abs=1e-7)  # float32
    ordered = np.sort(own, axis=1)
    assert found.margin_at_flips["mean"] == pytest.approx((ordered[:, -1] - ordered[:, -2])[flips].mean(), rel=1e-9)
    assert [flip.index for flip in found.flipped] == np.flatnonzero(flips).tolist()
    assert sum(found.flipped[0].reference_probs.values()) == pytest.approx(1)
    assert found.kl_mean_interval[0] < found.kl_mean < found.kl_mean_interval[1]


def test_a_planted_candidate_is_measured_as_what_it_is():
    """One row in fifty is flipped, by two labels that change places; all others are as they were."""
    reference, _ = _random(1000)
    candidate = reference.copy()
    rows = np.arange(0, 1000, 50)
    best, second = np.argsort(-reference[rows], axis=1)[:, :2].T
    candidate[rows, best], candidate[rows, second] = reference[rows, second], reference[rows, best]
    found = label_statistics(_table(reference, candidate))
    assert found.flips == 20 and found.flip_share == 0.02
    assert [flip.index for flip in found.flipped] == rows.tolist()
    assert list(_table(reference, candidate).flips()) == found.flipped
    assert found.rank_changes == pytest.approx(40 / 3000) and found.order_changes == 0.02
    assert found.mass_lost == pytest.approx(0, abs=1e-9)
    low, high = found.flip_share_interval
    assert 0.01 < low < 0.02 < high < 0.032  # the share's standard error is 0.0044


def test_planted_noise_is_the_deltas():
    """Logprobs off by normal noise: the mean of its size is sigma times the root of 2 / pi."""
    reference, _ = _random(20_000, width=2)
    noise = np.random.default_rng(1).normal(size=reference.shape) * 0.05
    found = label_statistics(_table(reference, (reference + noise).astype(np.float32)))
    assert found.abs_delta_logprob["mean"] == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.02)  # 4 errors
    assert found.abs_delta_logprob["p99"] == pytest.approx(0.05 * 2.5758, rel=0.03)
    assert found.delta_by_label[" 0"] == pytest.approx(0, abs=0.0015)
    for sizes in found.abs_delta_by_label.values():
        assert sizes["mean"] == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.025)  # 4 errors
        assert sizes["p99"] == pytest.approx(0.05 * 2.5758, rel=0.04)


def test_what_is_the_same_has_no_spread():
    reference, _ = _random(50)
    found = label_statistics(_table(reference, reference, gold=np.zeros(50, dtype=int)))
    assert (found.flips, found.kl_mean, found.tv_mean, found.abs_delta_logprob["max"]) == (0, 0, 0, 0)
    assert found.gold is not None and found.gold.mcnemar_p == 1 and found.gold.accuracy_change_interval == (0, 0)


def test_minus_infinity_is_a_value():
    reference = np.log(np.array([[0.5, 0.25, 1.0], [0.5, 0.25, 0.1]], dtype=np.float32))
    reference[0, 2] = -np.inf
    with np.errstate(all="raise"):
        assert label_statistics(_table(reference, reference)).abs_delta_logprob["mean"] == 0
        candidate = reference.copy()
        candidate[1, 2] = -np.inf
        found = label_statistics(_table(reference, candidate))
    assert found.kl_mean == math.inf and as_json(found.kl_mean) is None


def test_intervals_hold_the_mean_as_often_as_they_say():
    generator, hits = np.random.default_rng(2), 0
    for _ in range(200):
        low, high = mean_interval(generator.normal(1, 1, 100))
        hits += low <= 1 <= high
    assert 180 <= hits <= 199  # 190 are due, with a standard deviation of 3.1


def test_an_interval_of_many_rows_is_that_of_the_normal_distribution():
    values = np.random.default_rng(3).normal(0, 1, 5 * MAX_UNITS)
    low, high = mean_interval(values)
    error = values.std() / math.sqrt(len(values))
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, rel=0.08)  # 1,000 draws


def test_calibration_of_many_rows_is_summed_by_groups_of_them():
    """The sums of all groups are those of all rows, and no array has a cell a row and bin."""
    generator = np.random.default_rng(14)
    count = 3 * MAX_UNITS + 7
    confidences, hits = generator.random(count), generator.random(count) < 0.5
    found = reliability_features(confidences, hits, 10)
    assert found.shape == (MAX_UNITS, 10)
    bins = np.minimum((confidences * 10).astype(int), 9)
    assert found.sum(0) == pytest.approx([(hits - confidences)[bins == each].sum() for each in range(10)], rel=1e-9)
    groups = unit_of_rows(count)
    assert set(np.bincount(groups, minlength=MAX_UNITS)) == {3, 4}
    assert found[5] == pytest.approx(
        np.bincount(bins[groups == 5], weights=(hits - confidences)[groups == 5], minlength=10)
    )


def test_gold_gives_accuracy_calibration_and_mcnemar():
    reference, candidate = _random(400, noise=1.0)
    gold = np.where(np.random.default_rng(4).random(400) < 0.8, reference.argmax(1), 0)
    found = label_statistics(_table(reference, candidate, gold)).gold
    assert found is not None
    right = [each.argmax(1) == gold for each in (reference, candidate)]
    assert found.reference_accuracy == right[0].mean() and found.candidate_accuracy == right[1].mean()
    assert found.lost == (right[0] & ~right[1]).sum() and found.won == (~right[0] & right[1]).sum()
    assert found.mcnemar_p < 0.01
    assert found.accuracy_change_interval[0] < found.accuracy_change < found.accuracy_change_interval[1] < 0
    shares = np.exp(log_shares(reference))
    confidence = shares.max(1)
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((right[0] - confidence)[bins == i].sum()) for i in range(15)]
    assert found.reference_ece == pytest.approx(sum(gaps) / 400, rel=1e-6)


@pytest.mark.parametrize(("lost", "won", "p"), [(0, 0, 1.0), (5, 5, 1.0), (1, 9, 0.021484375), (9, 1, 0.021484375)])
def test_mcnemar_is_exact(lost, won, p):
    """2 (1 + 10) / 1024 of 1 and 9."""
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-12)


def test_binomials_equal_their_sums():
    for count, total, probability in ((0, 5, 0.3), (3, 10, 0.2), (40, 100, 0.5), (9, 10, 0.9)):
        exact = sum(math.comb(total, k) * probability**k * (1 - probability) ** (total - k) for k in range(count + 1))
        assert binomial_cdf(count, total, probability) == pytest.approx(exact, rel=1e-11)
    assert binomial_cdf(500_000, 1_000_000, 0.5) == pytest.approx(0.5004, abs=1e-4)


def test_the_limit_of_a_share_is_clopper_and_pearsons():
    assert share_upper_limit(0, 100, 0.95) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert binomial_cdf(7, 300, share_upper_limit(7, 300, 0.95)) == pytest.approx(0.05, rel=1e-6)
    assert share_upper_limit(10, 10, 0.95) == 1


def test_statistics_equal_scipys():
    stats = pytest.importorskip("scipy.stats")
    a, b = np.random.default_rng(5).integers(0, 6, (2, 40))
    assert kendall_tau(a, b) == pytest.approx(stats.kendalltau(a, b).statistic, rel=1e-12)
    a, b = np.random.default_rng(15).normal(size=(2, 50_000)).round(2)
    assert kendall_tau(a, a + b) == pytest.approx(stats.kendalltau(a, a + b).statistic, rel=1e-12)
    assert mcnemar(11, 25) == pytest.approx(stats.binomtest(11, 36, 0.5).pvalue, rel=1e-9)
    limit = stats.binomtest(7, 300, alternative="less").proportion_ci(0.95, method="exact").high
    assert share_upper_limit(7, 300, 0.95) == pytest.approx(limit, rel=1e-6)
    values = np.random.default_rng(9).exponential(size=300)
    interval = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=10).confidence_interval
    # Two draws of a percentile: 1,000 of ours leave an error of a twentieth of the half width.
    assert mean_interval(values) == pytest.approx(tuple(interval), abs=0.15 * (interval.high - interval.low))
    reference, candidate = _random(50)
    own, other = log_shares(reference), log_shares(candidate)
    assert kl_rows(own, other) == pytest.approx(stats.entropy(np.exp(own).T, np.exp(other).T), rel=1e-6)
    # No label is possible: there is no distribution, and no divergence of zero.
    none = log_shares(np.full(own.shape, -np.inf))
    assert np.isnan([kl_rows(none, other), kl_rows(own, none), tv_rows(none, other)]).all()


def test_orders():
    """One pair of six changes places among four documents: tau is (5 - 1) / 6."""
    assert kendall_tau([4, 3, 2, 1], [4, 3, 1, 2]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert math.isnan(kendall_tau([1, 1], [1, 2]))
    assert ndcg(np.array([3, 2, 1]), np.array([30, 20, 10])) == 1
    ideal, swapped = 10 + 9 / math.log2(3) + 4, 9 + 10 / math.log2(3) + 4
    assert ndcg(np.array([3, 2, 1]), np.array([2, 3, 1])) == pytest.approx(swapped / ideal)


def test_groups_are_the_rows_of_each():
    reference, candidate = _random(100)
    table = _table(reference, candidate, language=["en"] * 70 + ["de"] * 30)
    groups = by_field(table, "language")
    assert [(each.group, each.rows) for each in groups] == [("en", 70), ("de", 30)]
    assert sum(each.flips for each in groups) == label_statistics(table).flips
    part = label_statistics(table.of(np.arange(70)))
    assert groups[0].kl_mean == pytest.approx(part.kl_mean) and groups[0].flips == part.flips
    lengths = by_length(table)
    assert sum(each.rows for each in lengths) == 100 and len(lengths) == 4


def test_the_terminal_shows_flips_and_groups():
    reference, _ = _random(60)
    candidate = reference.copy()
    best, second = np.argsort(-reference[7])[:2]
    candidate[7, [best, second]] = reference[7, [second, best]]
    table = _table(reference, candidate, language=["en"] * 40 + ["de"] * 20)
    found = dataclasses.replace(
        _candidate("theirs", table), labels=label_statistics(table), by={"language": by_field(table, "language")}
    )
    cost = Cost("own", 60, 0, None, 1.0, 0.0, 1.0, "")
    shown = audit_table(Audit("rows", "labels", cost, [found])).splitlines()
    (flip,) = [line for line in shown if line.startswith("  7: ")]
    own, other = (np.exp(log_shares(each[7:8]))[0] for each in (reference, candidate))
    names = [f"{i} {own[i]:.3f}" for i in np.argsort(-own)], [f"{i} {other[i]:.3f}" for i in np.argsort(-other)]
    assert flip == f"  7: {', '.join(names[0])} -> {', '.join(names[1])}"
    assert "flips of theirs, 1 of 1 (row: reference -> candidate):" in shown
    groups = shown[shown.index("theirs by language:") + 1 :]
    assert groups[0].startswith("  en: 40 rows, 1 flips (2.50%)") and groups[1].startswith("  de: 20 rows, 0 flips")


def test_questions_of_other_widths_are_joined():
    wide, narrow = _random(30, 3), _random(20, 2, seed=7)
    tables = {"x": _table(*wide), "y": _table(*narrow)}
    whole = label_statistics(joined(tables))
    parts = [label_statistics(each) for each in tables.values()]
    assert whole.rows == 50 and whole.flips == parts[0].flips + parts[1].flips
    assert whole.kl_mean == pytest.approx((30 * parts[0].kl_mean + 20 * parts[1].kl_mean) / 50)
    means = [part.abs_delta_logprob["mean"] for part in parts]
    assert whole.abs_delta_logprob["mean"] == pytest.approx((90 * means[0] + 40 * means[1]) / 130)


def _candidate(name: str, table: LabelTable, seconds: float = 1.0) -> Candidate:
    rows = len(table.index)
    return Candidate(name, rows, 0, None, seconds, 0.0, 100.0, "", label_tables={"": table})


def _flipping(count: int, flips: np.ndarray) -> LabelTable:
    reference = np.tile(np.log(np.array([0.6, 0.4], dtype=np.float32)), (count, 1))
    candidate = reference.copy()
    candidate[flips] = candidate[flips][:, ::-1]
    places, zeros, ranks = np.arange(count), np.zeros(count), np.ones((count, 2), dtype=int)
    return LabelTable(["a", "b"], places, reference, candidate, ranks, ranks, zeros, zeros, places, places, {}, {})


def test_a_budget_of_flips_is_wrong_in_at_most_one_audit_of_twenty():
    """Three candidates whose true share of flips is just above the limit: none may be named."""
    generator, wrong = np.random.default_rng(6), 0
    for _ in range(400):
        candidates = [_candidate(str(i), _flipping(300, generator.random(300) < 0.0501)) for i in range(3)]
        wrong += decide(Budget("flips", 0.05), candidates, 300).cheapest is not None
    assert wrong <= 28  # 20 are due at most, with a standard deviation of 4.4


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_a_limit_of_a_skewed_mean_is_below_it_in_at_most_one_of_twenty(sigma):
    generator, wrong = np.random.default_rng(8), 0
    true = math.exp(sigma**2 / 2)
    for _ in range(300):
        wrong += mean_upper_limit(generator.lognormal(0, sigma, 200), 0.95) < true
    assert wrong <= 26  # 15 are due, with a standard deviation of 3.8


def test_the_cheapest_that_keeps_a_budget_is_named():
    flips = [np.arange(0), np.arange(0), np.arange(100)]
    slow, fast, bad = (
        _candidate(name, _flipping(2000, own), seconds)
        for name, own, seconds in zip(("slow", "fast", "bad"), flips, (9.0, 3.0, 1.0), strict=True)
    )
    found = decide(Budget.parse("flips<=0.5%", "labels"), [slow, fast, bad], 2000)
    assert found.cheapest == "fast" and [each.name for each in found.candidates] == ["bad", "fast", "slow"]
    assert decide(Budget("flips", 0.005), [bad], 2000).cheapest is None
    # Rows that it could not read may be anything.
    assert decide(Budget("flips", 0.005), [fast], 2001).cheapest is None
    # Too few rows to say so, though none flips.
    assert decide(Budget("flips", 0.005), [_candidate("few", _flipping(24, np.arange(0)))], 24).cheapest is None


@pytest.mark.parametrize(
    "text", ["flips", "flips<0.5", "speed<=1", "flips<=200%", "kl<=-1", "kl<=x", "kl<=1e999", "", "tv<=1"]
)
def test_a_bad_budget_is_named(text):
    with pytest.raises(CliError, match="--budget"):
        Budget.parse(text, "labels")


def test_total_variation_is_the_largest_difference_of_any_event():
    own, other = np.log([[0.5, 0.3, 0.2]]), np.log([[0.2, 0.4, 0.4]])
    assert tv_rows(own, other) == pytest.approx([0.3])

"""The choice of experts: against a float64 loop, on every implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.backends import backends, run
from vllm.ops.choose_experts import ExpertChoice, choose_experts

BACKENDS = backends("choose_experts")
CHOICES = {
    "softmax": ExpertChoice(3),
    "renormalised": ExpertChoice(3, renormalised=True, scale=1.5),
    "of-chosen": ExpertChoice(3, compares_logits=True),
    "sigmoid": ExpertChoice(2, "sigmoid", renormalised=True, added_to_sum=1e-20),
    "sigmoid-of-chosen": ExpertChoice(2, "sigmoid", compares_logits=True),
    "least-sum": ExpertChoice(3, renormalised=True, least_sum=0.9),
    "groups": ExpertChoice(3, "sigmoid", num_groups=4, num_groups_kept=2, group_best=2, renormalised=True, scale=2.5),
    "best-of-groups": ExpertChoice(2, num_groups=2, num_groups_kept=1),
    "softcap": ExpertChoice(3, "sigmoid", softcap=6.0),
    "mixed": ExpertChoice(2, mixes_within=0.2),
    "one": ExpertChoice(1),
}


def loop(row: list[float], choice: ExpertChoice, correction: list[float] | None) -> tuple[list[int], list[float]]:
    """One token's experts and weights, in Python's floats."""
    if choice.softcap:
        row = [math.tanh(x / choice.softcap) * choice.softcap for x in row]
    if choice.mixes_within:
        return mixed(row, choice.mixes_within)
    scores = row if choice.compares_logits else scored(row, choice)
    compared = scores if correction is None else [a + b for a, b in zip(scores, correction, strict=True)]
    size = len(row) // choice.num_groups
    groups = [sorted(compared[at : at + size], reverse=True) for at in range(0, len(row), size)]
    kept = best([sum(group[: choice.group_best]) for group in groups], choice.num_groups_kept)
    compared = [x if place // size in kept else -math.inf for place, x in enumerate(compared)]
    ids = best(compared, choice.num_chosen)
    weights = [scores[i] for i in ids]
    if choice.compares_logits:
        weights = scored(weights, choice)
    total = max(sum(weights), choice.least_sum) + choice.added_to_sum if choice.renormalised else 1.0
    return ids, [choice.scale * weight / total for weight in weights]


def scored(row: list[float], choice: ExpertChoice) -> list[float]:
    if choice.scores == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    exps = [math.exp(x - max(row)) for x in row]
    return [x / sum(exps) for x in exps]


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def mixed(row: list[float], within: float) -> tuple[list[int], list[float]]:
    first, second = best(row, 2)
    weights = []
    for chosen, left in ((first, row), (second, [-math.inf if i == first else x for i, x in enumerate(row)])):
        top = row[chosen]
        near = [
            x
            for x, own in zip(row, left, strict=True)
            if (top - x) / max(abs(x), top) <= 2 * within and own > -math.inf
        ]
        weights.append(1 / sum(math.exp(x - top) for x in near))
    return [first, second], weights


def logits_of(rows: int, experts: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("experts", "has_correction"), [(8, True), (20, True), (64, False)])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_of_a_loop(name: str, experts: int, has_correction: bool, backend: str) -> None:
    choice, logits = CHOICES[name], logits_of(5, experts)
    correction = logits_of(1, experts, 3)[0] / 4 if has_correction else None
    ids, weights = run(backend, choose_experts, logits, choice, correction)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    bias = None if correction is None or choice.mixes_within else correction.double().tolist()
    for row, own_ids, own_weights in zip(logits.double().tolist(), ids.tolist(), weights.tolist(), strict=True):
        wanted_ids, wanted = loop(row, choice, bias)
        assert own_ids == wanted_ids
        assert own_weights == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHOICES)
def test_of_equals_the_lower_is_first(name: str, backend: str) -> None:
    choice = CHOICES[name]
    ids, _ = run(backend, choose_experts, torch.full((2, 16), 0.5), choice)
    assert ids.tolist() == [list(range(choice.num_chosen))] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_all_experts(scores: str, backend: str) -> None:
    logits = logits_of(3, 12)
    ids, weights = run(backend, choose_experts, logits, ExpertChoice(12, scores, renormalised=True))
    assert torch.equal(ids.long(), logits.sort(descending=True)[1])
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHOICES)
def test_nan_stays_in_its_row(name: str, backend: str) -> None:
    logits = logits_of(3, 16)
    alone = run(backend, choose_experts, logits, CHOICES[name])
    spoilt = logits.clone()
    spoilt[1, 5] = torch.nan
    ids, weights = run(backend, choose_experts, spoilt, CHOICES[name])
    for row in (0, 2):
        assert torch.equal(ids[row], alone[0][row]) and torch.equal(weights[row], alone[1][row])
    assert len(set(ids[1].tolist())) == CHOICES[name].num_chosen and 0 <= ids[1].min() <= ids[1].max() < 16
    assert weights[1].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_others(backend: str) -> None:
    logits = logits_of(20, 64)
    choice = replace(CHOICES["groups"], num_chosen=6)
    whole = run(backend, choose_experts, logits, choice)
    for row in (0, 17):
        alone = run(backend, choose_experts, logits[row : row + 1], choice)
        assert all(torch.equal(own[0], all_rows[row]) for own, all_rows in zip(alone, whole, strict=True))


def test_no_tokens() -> None:
    ids, weights = choose_experts(torch.empty(0, 8), ExpertChoice(2))
    assert ids.shape == weights.shape == (0, 2)

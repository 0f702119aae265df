"""Which experts of a mixture a token goes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function

SCORES = {"softmax": 0, "sigmoid": 1}
"""By which the kernels know them."""


@dataclass(frozen=True)
class ExpertChoice:
    """How experts are chosen by a token's logits, one for each expert, and the weights of what they give.

    Attributes:
        num_chosen: K, the experts of a token.
        scores: of a logit: "softmax" over all logits (where `compares_logits`, over the chosen ones), or "sigmoid".
        compares_logits: the greatest logits are chosen; else the greatest scores.
        num_groups: the experts are in so many groups of one size, one after another.
        num_groups_kept: experts are chosen of so many groups.
        group_best: a group counts as much as the sum of so many of its greatest experts.
        renormalised: weights are divided by their sum, which is at least `least_sum`, plus `added_to_sum`.
        scale: factor on the weights.
        softcap: logits become c * tanh(logit / c); 0: they stay.
        mixes_within: of two chosen experts each weight is a softmax: the first one's over logits near the greatest, the
            second one's over those near the greatest but one, which are within twice this share of their magnitude
            (SparseMixer, arXiv:2310.00811); 0: not so.
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    compares_logits: bool = False
    num_groups: int = 1
    num_groups_kept: int = 1
    group_best: int = 1
    renormalised: bool = False
    least_sum: float = 0.0
    added_to_sum: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    mixes_within: float = 0.0


def choose_experts(logits: Tensor, choice: ExpertChoice, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, int32 [T, K] from the best to the least, of equals the lower first, and the weights of
    what they give, float32 [T, K]. A row's result depends on nothing but its logits.

    Args:
        logits: float32 [T, E], contiguous.
        correction: float32 [E], added to what is compared and not to the weights.
    """
    which = implementation(logits)
    if which == "cpp":
        return torch.ops.vllm_cpu.choose_experts(logits, correction, *_numbers(choice))
    if which == "triton":
        return triton_function("choose_experts", __name__)(logits, choice, correction)
    return _reference(logits, choice, correction)


def _numbers(choice: ExpertChoice) -> tuple[int | float | bool, ...]:
    return (
        choice.num_chosen,
        SCORES[choice.scores],
        choice.compares_logits,
        choice.num_groups,
        choice.num_groups_kept,
        choice.group_best,
        choice.renormalised,
        choice.least_sum,
        choice.added_to_sum,
        choice.scale,
        choice.softcap,
        choice.mixes_within,
    )


def _reference(logits: Tensor, choice: ExpertChoice, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    if choice.softcap:
        logits = torch.tanh(logits / choice.softcap) * choice.softcap
    if choice.mixes_within:
        ids, weights = _mixed(logits, choice.mixes_within)
        return ids, weights * choice.scale
    scores = logits
    if not choice.compares_logits:
        scores = logits.softmax(-1) if choice.scores == "softmax" else logits.sigmoid()
    compared = scores if correction is None else scores + correction
    if choice.num_groups_kept < choice.num_groups:
        compared = _of_best_groups(compared, choice)
    ids = _greatest(compared, choice.num_chosen)
    weights = scores.gather(1, ids)
    if choice.compares_logits:
        weights = weights.softmax(-1) if choice.scores == "softmax" else weights.sigmoid()
    if choice.renormalised:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=choice.least_sum) + choice.added_to_sum)
    return ids.int(), weights * choice.scale


def _greatest(values: Tensor, count: int) -> Tensor:
    """Places of each row's `count` greatest, int64, of equals the lower one first, NaN before all."""
    return values.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def _of_best_groups(compared: Tensor, choice: ExpertChoice) -> Tensor:
    """-inf in all groups but the best."""
    groups = compared.unflatten(1, (choice.num_groups, -1))
    sums = groups.topk(min(choice.group_best, groups.shape[2]), dim=-1)[0].sum(-1)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, _greatest(sums, choice.num_groups_kept), True)
    return groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _mixed(logits: Tensor, within: float) -> tuple[Tensor, Tensor]:
    ids, weights, left = [], [], logits
    for _ in range(2):
        best = _greatest(left, 1)
        greatest = left.gather(1, best)
        is_far = (greatest - logits) / torch.maximum(logits.abs(), greatest) > 2 * within
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(ids, 1).int(), torch.cat(weights, 1)

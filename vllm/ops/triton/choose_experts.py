"""Triton implementation of `choose_experts`: a program has one token, whose logits are in its registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.choose_experts import ExpertChoice


def choose_experts(logits: Tensor, choice: ExpertChoice, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    ids = torch.empty((num_rows, choice.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, choice.num_chosen), dtype=torch.float32, device=logits.device)
    if not num_rows:
        return ids, weights
    _choose_experts_kernel[(num_rows,)](
        logits,
        correction,
        ids,
        weights,
        choice.least_sum,
        choice.added_to_sum,
        choice.scale,
        choice.softcap,
        choice.mixes_within,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=choice.num_chosen,
        SIGMOID=choice.scores == "sigmoid",
        COMPARES_LOGITS=choice.compares_logits,
        NUM_GROUPS=choice.num_groups,
        NUM_GROUPS_KEPT=choice.num_groups_kept,
        GROUP_BEST=min(choice.group_best, num_experts // choice.num_groups),
        RENORMALISED=choice.renormalised,
        SOFTCAP=choice.softcap > 0,
        MIXES=choice.mixes_within > 0,
        BLOCK=triton.next_power_of_2(num_experts),
        CHOSEN_BLOCK=triton.next_power_of_2(choice.num_chosen),
        GROUP_BLOCK=triton.next_power_of_2(choice.num_groups),
    )
    return ids, weights


# Values are -inf where there are none.
@triton.jit
def _scores(values, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-values))
    exps = tl.exp(values - tl.max(values, axis=0))
    return exps / tl.sum(exps, axis=0)


# Place of the greatest value, of equals the lower, NaN before all.
@triton.jit
def _greatest(values, places):
    comparable = tl.where(values == values, values, float("inf"))
    most = tl.max(comparable, axis=0)
    return tl.min(tl.where(comparable == most, places, 0x7FFFFFFF), axis=0)


# -inf in the experts of all groups but the best.
@triton.jit
def _of_best_groups(
    compared,
    places,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups = tl.arange(0, GROUP_BLOCK)
    sums = tl.where(groups < NUM_GROUPS, 0.0, float("-inf"))
    for group in tl.static_range(NUM_GROUPS):
        left = tl.where(places // size == group, compared, float("-inf"))
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            place = _greatest(left, places)
            total += tl.sum(tl.where(places == place, left, 0.0), axis=0)
            left = tl.where(places == place, float("-inf"), left)
        sums = tl.where(groups == group, total, sums)
    kept = places < 0
    for _ in tl.static_range(NUM_GROUPS_KEPT):
        group = _greatest(sums, groups)
        kept = kept | (places // size == group)
        sums = tl.where(groups == group, float("-inf"), sums)
    return tl.where(kept, compared, float("-inf"))


# logits [R, E], correction [E], ids and weights [R, K]
@triton.jit
def _choose_experts_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    least_sum,
    added_to_sum,
    scale,
    softcap,
    mixes_within,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    COMPARES_LOGITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MIXES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + places, mask=inside, other=float("-inf"))
    if SOFTCAP:
        logits = tl.where(inside, (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0)) * softcap, logits)
    scores = logits
    if not COMPARES_LOGITS and not MIXES:
        scores = tl.where(inside, _scores(logits, SIGMOID), float("-inf"))
    compared = scores
    if correction_ptr is not None and not MIXES:
        compared += tl.load(correction_ptr + places, mask=inside, other=0.0)
    if NUM_GROUPS_KEPT < NUM_GROUPS:
        compared = _of_best_groups(compared, places, NUM_EXPERTS, NUM_GROUPS, NUM_GROUPS_KEPT, GROUP_BEST, GROUP_BLOCK)
    columns = tl.arange(0, CHOSEN_BLOCK)
    weights = tl.full((CHOSEN_BLOCK,), float("-inf"), tl.float32)
    ids = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    # A value that was taken is below all others, NaN and -inf too.
    is_taken = ~inside
    for column in tl.static_range(NUM_CHOSEN):
        comparable = tl.where(compared == compared, tl.maximum(compared, -3.0e38), float("inf"))
        comparable = tl.where(is_taken, float("-inf"), comparable)
        place = _greatest(comparable, places)
        is_own = places == place
        value = tl.sum(tl.where(is_own, scores, 0.0), axis=0)
        if MIXES:
            left = tl.where(is_taken, float("-inf"), logits)
            is_far = (value - logits) / tl.maximum(tl.abs(logits), value) > 2.0 * mixes_within
            near = _scores(tl.where(is_far, float("-inf"), left), False)
            value = tl.sum(tl.where(is_own, near, 0.0), axis=0)
        weights = tl.where(columns == column, value, weights)
        ids = tl.where(columns == column, place, ids)
        is_taken = is_taken | is_own
    is_column = columns < NUM_CHOSEN
    if COMPARES_LOGITS and not MIXES:
        weights = _scores(weights, SIGMOID)
    if RENORMALISED and not MIXES:
        total = tl.sum(tl.where(is_column, weights, 0.0), axis=0)
        weights = weights / (tl.maximum(total, least_sum) + added_to_sum)
    tl.store(weights_ptr + row * NUM_CHOSEN + columns, weights * scale, mask=is_column)
    tl.store(ids_ptr + row * NUM_CHOSEN + columns, ids, mask=is_column)

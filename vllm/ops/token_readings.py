"""Chosen tokens' logits and true ranks, with the row's log-sum-exp, argmax and entropy, from one pass over logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.count_above import check_columns, count_above_reference
from vllm.ops.topk import topk


class RowReadings(NamedTuple):
    """The results of one pass over R rows of logits. Padding columns hold logit 0.0 and rank 0."""

    logits: Tensor  # float32 [R, W]
    ranks: Tensor  # int32 [R, W]; 1 + the number of strictly greater logits in the row; 0 where not requested
    lse: Tensor  # float32 [R]; log(sum(exp(row)))
    argmax: Tensor  # int32 [R]; the lowest id among equals
    max: Tensor  # float32 [R]
    entropy: Tensor | None = None  # float32 [R], in nats, never negative; None when not requested
    # float32 [R, W], padding 0.0; None: the caller computes them from logits and lse.
    logprobs: Tensor | None = None
    token_ids: Tensor | None = None  # int32 [R, W], what was read; None: what was given
    # int32 [R, 4 W + 2], each row's token ids, logprobs, logits, ranks, lse, entropy (NaN where not requested), floats
    # as their bits. None: not requested, or left to the caller.
    table: Tensor | None = None


def token_readings(
    logits: Tensor,
    token_ids: Tensor,
    num_token_ids: Tensor | None = None,
    *,
    entropy: bool = False,
    ranks: bool = True,
    greedy: bool = False,
    table: bool = False,
    num_topk: int = 0,
) -> RowReadings:
    """Read chosen tokens of each row.

    A token's logprob is `logits - lse`. -inf stays -inf, and a row of -inf only has lse -inf. A NaN in a row makes its
    lse NaN, and the row's other results are then meaningless (argmax stays a valid id).

    The entropy of a row is that of softmax(row): 0 where one logit alone is finite, NaN where none is or where there is
    a NaN or +inf. Requesting it changes no bit of the other results.

    Args:
        logits: [R, V], float32, bfloat16 or float16; the last dimension contiguous, any stride between rows.
        token_ids: int32 [R, W], each in [0, V); the last dimension contiguous. An id may stand twice.
        num_token_ids: int32 [R], how many leading columns of each row hold an id; the others are padding, whose ids
            are not read. None: all W.
        greedy: each row's first id, which must count, is its argmax, whatever `token_ids` holds there.
        table: give the results as a table, too, if the kernel can write one.
        num_topk: K, so many columns after the first are the row's greatest logits as `ops.topk` orders them, whatever
            `token_ids` holds there; all of them must count. The readings then have `token_ids`.
        ranks: False leaves them 0, which of many ids saves most of the time.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    check_columns(logits, "token_ids", token_ids, torch.int32, num_token_ids)
    least = 1 + num_topk if num_topk else int(greedy)
    if token_ids.shape[1] < least:
        raise ValueError(f"token_ids must have {least} columns for the argmax and the top-k, got {token_ids.shape[1]}")
    which = implementation(logits)
    if which == "cpp":
        options = entropy, greedy, table, num_topk, ranks
        return RowReadings(*torch.ops.vllm_cpu.token_readings(logits, token_ids, num_token_ids, *options))
    if num_topk:
        token_ids = token_ids.clone()
        token_ids[:, 1 : 1 + num_topk] = topk(logits, num_topk)[1]
    if greedy:
        counts = None if num_token_ids is None else num_token_ids - 1
        others = token_readings(logits, token_ids[:, 1:], counts, entropy=entropy, ranks=ranks)
        return _put_argmax(token_ids, others, int(ranks))
    if which == "triton":
        function = triton_function("token_readings", __name__)
        readings = RowReadings(*function(logits, token_ids, num_token_ids, entropy, ranks))
    else:
        readings = _reference(logits, token_ids, num_token_ids, ranks)
        if entropy:
            readings = readings._replace(entropy=_entropy(logits.float(), readings.max))
    return readings._replace(token_ids=token_ids) if num_topk else readings


def _put_argmax(token_ids: Tensor, others: RowReadings, rank: int) -> RowReadings:
    """The readings of all columns from those of all but the first, the argmax."""
    return others._replace(
        token_ids=torch.cat((others.argmax[:, None], token_ids[:, 1:]), dim=1),
        logits=torch.cat((others.max[:, None], others.logits), dim=1),
        ranks=torch.nn.functional.pad(others.ranks, (1, 0), value=rank),
    )


def _reference(logits: Tensor, token_ids: Tensor, num_token_ids: Tensor | None, ranked: bool) -> RowReadings:
    values = logits.float()
    highest = values.amax(dim=-1)
    lse = values.logsumexp(dim=-1)
    column = torch.arange(values.shape[1], device=values.device)
    last = values.shape[1] - 1
    argmax = torch.where(values == highest[:, None], column, last).amin(dim=-1).to(torch.int32)
    ids = token_ids.to(torch.int64)
    num_ids = ids.shape[1] if num_token_ids is None else num_token_ids[:, None]
    padding = torch.arange(ids.shape[1], device=ids.device) >= num_ids
    chosen = values.gather(1, ids.masked_fill(padding, 0))
    ranks = torch.zeros_like(token_ids)
    if ranked:
        ranks = (1 + count_above_reference(values, chosen)).masked_fill_(padding, 0)
    return RowReadings(chosen.masked_fill_(padding, 0.0), ranks, lse, argmax, highest)


def _entropy(values: Tensor, highest: Tensor) -> Tensor:
    """float32 [R]: log(S) - sum(shifted * exp(shifted)) / S, shifted the values less their maximum."""
    shifted = values - highest[:, None]
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    # -inf becomes a number whose exponential is 0 too: 0 times -inf would be NaN.
    weighted = (shifted.clamp_(min=-200.0) * weights).sum(dim=-1)
    return (total.log() - weighted / total).clamp_(min=0.0)

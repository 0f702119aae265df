"""top-k and top-p truncation."""

from __future__ import annotations

import torch

from vllm.ops.token_readings import token_readings
from vllm.ops.topk import topk

_NUCLEUS_HEADS = (64, 1024)
"""Sizes of the sorted head that top-p looks into before it sorts the vocabulary."""


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int, top_p: torch.Tensor) -> None:
    """Keep each row's `top_k` most likely tokens, then of these the smallest set that holds `top_p` of their
    probability; set the rest to -inf, in place.

    Exactly `top_k` tokens pass the first cut: among equal logits the lower ids do, so top_k = 1 is greedy.

    Args:
        logits: float32 [R, V], temperature applied.
        top_k: int [R], in [1, V).
        max_top_k: the greatest of them.
        top_p: float32 [R], in (0, 1]; 1 = no second cut.
    """
    values, ids = topk(logits, max_top_k)
    column = torch.arange(max_top_k, device=logits.device)
    values = values.masked_fill(column >= top_k[:, None], -torch.inf)
    keep, _ = _nucleus(values, values.double().logsumexp(dim=-1), top_p)
    _keep_only(logits, ids, values.masked_fill_(~keep, -torch.inf))


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep each row's smallest set of most likely tokens that holds `top_p` of the probability, at least one;
    set the rest to -inf, in place. Among equal logits the lower ids are kept.

    Args:
        logits: float32 [R, V], temperature applied.
        top_p: float32 [R], in (0, 1).
    """
    vocab_size = logits.shape[1]
    no_ids = torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)
    lse = token_readings(logits, no_ids).lse.double()
    # The nucleus is nearly always small, and sorting a vocabulary is dear on CPU. On CUDA the sort is cheap,
    # and asking whether a head was enough would wait for the device.
    heads = [size for size in _NUCLEUS_HEADS if size < vocab_size] if logits.device.type == "cpu" else []
    _keep_nucleus(logits, lse, top_p, [*heads, vocab_size])


def _keep_nucleus(logits: torch.Tensor, lse: torch.Tensor, top_p: torch.Tensor, sizes: list[int]) -> None:
    """Look for each row's nucleus among its `sizes[0]` most likely tokens; for the rows where it is larger,
    go on with the next size. The last size is the vocabulary."""
    values, ids = _sorted(logits) if len(sizes) == 1 else topk(logits, sizes[0])
    keep, held = _nucleus(values, lse, top_p)
    values = values.masked_fill(~keep, -torch.inf)
    larger = torch.nonzero(held < top_p).squeeze(1) if len(sizes) > 1 else None
    if larger is None or not len(larger):
        _keep_only(logits, ids, values)
        return
    rest = logits[larger]
    _keep_nucleus(rest, lse[larger], top_p[larger], sizes[1:])
    _keep_only(logits, ids, values)
    logits[larger] = rest


def _sorted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values, ids


def _nucleus(values: torch.Tensor, lse: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of a row's most likely tokens belong to the nucleus.

    Args:
        values: float32 [R, K], sorted descending.
        lse: float64 [R], over all that the probability is shared among.
        top_p: float32 [R].

    Returns:
        keep bool [R, K]; the probability of all K columns, float64 [R].
    """
    probs = (values.double() - lse[:, None]).exp_()
    cumulative = probs.cumsum(dim=-1)
    # A token stays while the ones before it do not hold top_p yet. top_p = 1 keeps all: rounding must not cut
    # the tail.
    share = top_p.double()[:, None]
    keep = (cumulative - probs < share) | (share >= 1)
    keep[:, 0] = True
    return keep, cumulative[:, -1]


def _keep_only(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    logits.fill_(-torch.inf)
    logits.scatter_(1, ids.to(torch.int64), values)

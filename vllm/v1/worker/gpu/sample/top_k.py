"""top-k truncation, and the nucleus within it; top-p alone is `ops/top_p.py`."""

from __future__ import annotations

import torch

from vllm.ops.top_p import nucleus
from vllm.ops.topk import topk


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
    keep = nucleus(values, values.double().logsumexp(dim=-1), top_p)
    logits.fill_(-torch.inf)
    logits.scatter_(1, ids.to(torch.int64), values.masked_fill_(~keep, -torch.inf))

"""min_p: drop tokens that are much less likely than the most likely one."""

from __future__ import annotations

import torch


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Set to -inf, in place, what has less than `min_p` times the probability of the row's most likely token.

    Probabilities need not be normalised for that: p / p_max = exp(x - x_max).

    Args:
        logits: float32 [R, V], temperature applied.
        min_p: float32 [R], in (0, 1].
    """
    threshold = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)

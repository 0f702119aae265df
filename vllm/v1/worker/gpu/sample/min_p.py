"""min_p: drop tokens that are much less likely than the most likely one."""

from __future__ import annotations

import torch

from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab


def apply_min_p(logits: torch.Tensor, log_min_p: torch.Tensor, vocab: WholeVocab = WHOLE) -> None:
    """Set to -inf, in place, what has less than `min_p` times the probability of the row's most likely token.

    Probabilities need not be normalised for that: p / p_max = exp(x - x_max).

    Args:
        logits: float32 [R, V], temperature applied.
        log_min_p: float32 [R], the logarithms of min_p, at most 0. Not taken here: how a vector's logarithm rounds may
            depend on where in the vector a row stands.
    """
    threshold = vocab.highest(logits) + log_min_p
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)

"""Truncation by min_p and by top_k, with the nucleus within top-k; top_p alone is `ops/top_p.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.top_p import keep_top_p_
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab

_VECTOR = 16  # floats of the widest SIMD register


def apply_min_p(logits: Tensor, log_min_p: Tensor, vocab: WholeVocab = WHOLE) -> None:
    """Set to -inf, in place, what has less than `min_p` times the probability of the row's most likely token. Logits
    float32 [R, V], temperature applied, need no normalisation: p / p_max = exp(x - x_max). `log_min_p`, float32 [R], is
    not computed here: how a vector's logarithm rounds may depend on a row's place in the vector."""
    threshold = vocab.highest(logits) + log_min_p
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def apply_top_k(logits: Tensor, top_k: Tensor, max_top_k: int, top_p: Tensor, vocab: WholeVocab = WHOLE) -> None:
    """Keep each row's `top_k` most likely tokens, then of these the smallest set that holds `top_p` of their
    probability; set the rest to -inf, in place. Exactly `top_k` tokens pass the first cut, the lower ids among equals.

    Args:
        logits: float32 [R, V], temperature applied.
        top_k: int [R], in [1, V); `max_top_k` is their maximum.
        top_p: float32 [R], in (0, 1]; 1 = no second cut.
    """
    values, token_ids = vocab.topk(logits, max_top_k)
    column = torch.arange(max_top_k, device=logits.device)
    # Padded to whole vectors of every kernel, so that the summation order of a row's probabilities does not depend on
    # the other rows' top_k.
    width = -(-max_top_k // _VECTOR) * _VECTOR
    kept = values.new_full((len(values), width), -torch.inf)
    kept[:, :max_top_k] = values.masked_fill(column >= top_k[:, None], -torch.inf)
    keep_top_p_(kept, top_p)
    vocab.keep_only_(logits, token_ids, kept[:, :max_top_k])

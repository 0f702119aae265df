"""top-k truncation, and the nucleus within it; top-p alone is `ops/top_p.py`."""

from __future__ import annotations

import torch

from vllm.ops.top_p import keep_top_p_
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab

_VECTOR = 16  # floats of the widest one


def apply_top_k(
    logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int, top_p: torch.Tensor, vocab: WholeVocab = WHOLE
) -> None:
    """Keep each row's `top_k` most likely tokens, then of these the smallest set that holds `top_p` of their
    probability; set the rest to -inf, in place.

    Exactly `top_k` tokens pass the first cut: among equal logits the lower ids do, so top_k = 1 is greedy.

    Args:
        logits: float32 [R, V], temperature applied.
        top_k: int [R], in [1, V).
        max_top_k: the greatest of them.
        top_p: float32 [R], in (0, 1]; 1 = no second cut.
    """
    values, token_ids = vocab.topk(logits, max_top_k)
    column = torch.arange(max_top_k, device=logits.device)
    # Padded to whole vectors of every kernel: how a row's probabilities are added then does not depend on the others'
    # top_k, by which `max_top_k` is wider than its own.
    width = -(-max_top_k // _VECTOR) * _VECTOR
    kept = values.new_full((len(values), width), -torch.inf)
    kept[:, :max_top_k] = values.masked_fill(column >= top_k[:, None], -torch.inf)
    keep_top_p_(kept, top_p)
    vocab.keep_only_(logits, token_ids, kept[:, :max_top_k])

"""Top-p: each row's smallest set of most likely tokens (the nucleus) that holds a share of the probability."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function


def keep_top_p_(logits: Tensor, top_p: Tensor) -> None:
    """Set everything outside the nucleus to -inf, in place. ValueError for a wrong shape or dtype.

    A token stays while the more likely ones do not hold `top_p` of the probability yet; so at least one does. Among
    equal logits the lower ids are the more likely ones.

    `logits` are float32 [R, V], the last dimension contiguous, any stride between rows; the result of a row that holds
    NaN or +inf, or -inf only, is not defined. `top_p` is float32 [R], in (0, 1]; 1 = everything stays.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            "logits must be float32 [R, V] with the last dimension contiguous, got "
            f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}"
        )
    if top_p.shape != logits.shape[:1] or top_p.dtype != torch.float32:
        raise ValueError(f"top_p must be float32 [{len(logits)}], got {top_p.dtype} {tuple(top_p.shape)}")
    which = implementation(logits)
    if which == "cpp" and logits.shape[1] > 0:
        torch.ops.vllm_cpu.keep_top_p_(logits, top_p)
    elif which == "triton":
        triton_function("keep_top_p_", __name__)(logits, top_p)
    else:
        _reference(logits, top_p)


def _reference(logits: Tensor, top_p: Tensor) -> None:
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    probs = (values.double() - values.double().logsumexp(dim=-1)[:, None]).exp_()
    before = probs.cumsum(dim=-1) - probs
    # top_p = 1 keeps all: rounding must not cut the tail.
    share = top_p.double()[:, None]
    keep = (before < share) | (share >= 1)
    keep[:, :1] = True
    logits.fill_(-torch.inf)
    logits.scatter_(1, ids, values.masked_fill(~keep, -torch.inf))

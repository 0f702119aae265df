"""Keeping the logits of allowed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function


def keep_bits_(logits: Tensor, mask: Tensor, first: int = 0, rows: Tensor | None = None) -> None:
    """Set to -inf, in place, the logits of tokens whose bit is 0. ValueError for a wrong shape or dtype.

    Args:
        logits: float32 [L, V], the last dimension contiguous; column 0 is of token `first`.
        mask: int32 [R, W], contiguous, a bit a token, the lowest bit of a word first; 32 * W >= first + V.
        rows: int64 [R], distinct, the masks' rows of `logits`; None: R = L, in order.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            "logits must be float32 [L, V] with the last dimension contiguous, got "
            f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}"
        )
    if mask.dim() != 2 or mask.dtype != torch.int32 or not 0 <= first <= 32 * mask.shape[1] - logits.shape[1]:
        end = first + logits.shape[1]
        raise ValueError(f"mask must be int32 with bits up to {end}, got {mask.dtype} {tuple(mask.shape)}")
    wanted = logits.shape[:1] if rows is None else rows.shape
    if mask.shape[:1] != wanted or (rows is not None and rows.dtype != torch.int64):
        raise ValueError(f"mask must have {list(wanted)} rows, and rows be int64, got {mask.shape[0]} rows")
    which = implementation(logits)
    if which == "cpp" and logits.shape[1] > 0:
        torch.ops.vllm_cpu.keep_bits_(logits, mask, first, rows)
    elif which == "triton":
        triton_function("keep_bits_", __name__)(logits, mask, first, rows)
    else:
        _reference(logits, mask, first, rows)


def _reference(logits: Tensor, mask: Tensor, first: int, rows: Tensor | None) -> None:
    places = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask[:, :, None] >> places & 1).flatten(1)[:, first : first + logits.shape[1]]
    part = logits if rows is None else logits[rows]
    kept = part.masked_fill(bits == 0, -torch.inf)
    logits[slice(None) if rows is None else rows] = kept

"""Root-mean-square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched, implementation, triton_function


class AddedNorm(NamedTuple):
    """The arguments of `fused_add_rms_norm_` beside x, for an operation that does it before its own."""

    residual: Tensor
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return fused_add_rms_norm_(x, self.residual, self.weight, self.eps)


NO_NORM = (None, None, 0.0)
"""In place of an AddedNorm's arguments."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once to x's dtype; contiguous.
    `x` is float32, bfloat16 or float16 [..., H], the last dimension contiguous; `weight` [H] has its dtype or is
    float32."""
    which = implementation(x)
    if which == "reference":
        return _reference(x, weight, eps)
    norm = torch.ops.vllm_cpu.rms_norm if which == "cpp" else triton_function("rms_norm", __name__)
    if x.dim() in (2, 3):
        return norm(x, weight, eps)
    return norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


@dispatched
def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the norm of the rounded residual, as unfused: [T, H], contiguous. `x` and
    `residual` [T, H], the last dimension contiguous, have one dtype, `weight` [H] has theirs or is float32."""
    residual += x
    return _reference(residual, weight, eps)


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)

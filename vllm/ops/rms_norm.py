"""Root-mean-square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation


class AddedNorm(NamedTuple):
    """What `fused_add_rms_norm_` does to an x, for an operation to do it before its own: see there."""

    residual: Tensor
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Do it now."""
        return fused_add_rms_norm_(x, self.residual, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once to x's dtype.

    Args:
        x: float32, bfloat16 or float16 [..., H]; the last dimension contiguous.
        weight: [H], of x's dtype.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    which = implementation(x)
    if which == "cpp":
        if x.dim() in (2, 3):
            return torch.ops.vllm_cpu.rms_norm(x, weight, eps)
        return torch.ops.vllm_cpu.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    if which == "triton":
        from vllm.ops.triton import rms_norm as kernels

        return kernels.rms_norm(x, weight, eps)
    return _reference(x, weight, eps)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the norm of the new residual.

    Args:
        x: [T, H]; the last dimension contiguous.
        residual: [T, H] of x's dtype; the last dimension contiguous.
        weight: [H], of x's dtype.

    Returns:
        [T, H], contiguous. The norm is of the rounded residual, as it would be unfused.
    """
    which = implementation(x)
    if which == "cpp":
        return torch.ops.vllm_cpu.fused_add_rms_norm_(x, residual, weight, eps)
    if which == "triton":
        from vllm.ops.triton import rms_norm as kernels

        return kernels.fused_add_rms_norm_(x, residual, weight, eps)
    residual += x
    return _reference(residual, weight, eps)


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)

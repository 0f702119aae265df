"""Triton implementations of the RMSNorms."""

from __future__ import annotations

from torch import Tensor

from vllm.ops.triton.norms import launch_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, None, weight, None, eps, centered=False)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, residual, weight, None, eps, centered=False)

"""Triton implementations of the layer norms."""

from __future__ import annotations

from torch import Tensor

from vllm.ops.triton.norms import launch_norm


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return launch_norm(x, None, weight, bias, eps, centered=True)


def fused_add_layer_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return launch_norm(x, residual, weight, bias, eps, centered=True)

"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.rms_norm import AddedNorm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def adding_to(self, residual: Tensor) -> AddedNorm:
        """A function that adds x to `residual` in place, both [T, H], and normalises the sum; linear layers take it to
        apply it before their product."""
        return AddedNorm(residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension; no weight and bias when not affine."""

    def __init__(self, hidden_size: int, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if affine:
            self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
            self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

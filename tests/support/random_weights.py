"""Weights of models that transformers makes."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def fill_weights(model: Any, seed: int, spread: float = 0.25) -> None:
    """Random values, of matrices with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = spread if parameter.ndim > 1 else 1.2 * spread
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if parameter.ndim == 1:
            parameter.add_(0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + torch.rand((), generator=generator))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * spread)

"""x * factor, x + y and their like as operations that a recording can hold. PyTorch's are as fast on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, rounded once. `x` is float32, bfloat16 or float16, contiguous."""
    return torch.ops.vllm_cpu.scaled(x, factor) if implementation(x) == "cpp" else x * factor


def added(x: Tensor, y: Tensor) -> Tensor:
    """x + y of one shape and dtype, float32, bfloat16 or float16, rounded once; both are contiguous."""
    return torch.ops.vllm_cpu.added(x, y) if implementation(x) == "cpp" else x + y


def added_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + sigmoid(gate) * y, [T, H], in float32 and rounded once. `x` and `y` have one shape and dtype, float32,
    bfloat16 or float16, and `gate` is float32 [T, 1]; all are contiguous."""
    if implementation(x) == "cpp":
        return torch.ops.vllm_cpu.added_gated(x, y, gate)
    return (x + torch.sigmoid(gate) * y).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x [T, H], float32, bfloat16 or float16 with any stride of rows, as float32."""
    return torch.ops.vllm_cpu.widened(x) if implementation(x) == "cpp" else x.float()

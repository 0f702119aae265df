"""x * factor, x + y and their like as operations that a recording can hold. PyTorch's are as fast on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def gated(x: Tensor, gate: Tensor, softplus: bool = False) -> Tensor:
    """x * sigmoid(gate), or x * ln(1 + e^gate) by `softplus`, in float32 and rounded once. `x` is [T, W] and `gate`
    [T, G], whose columns belong to W / G columns of x each; both are contiguous and of one dtype, float32, bfloat16 or
    float16."""
    if implementation(x) == "cpp":
        return torch.ops.vllm_cpu.gated(x, gate, softplus)
    factor = F.softplus(gate.float()) if softplus else torch.sigmoid(gate.float())
    return (x.unflatten(1, (gate.shape[1], -1)) * factor[:, :, None]).flatten(1).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x [T, H], float32, bfloat16 or float16 with any stride of rows, as float32."""
    return torch.ops.vllm_cpu.widened(x) if implementation(x) == "cpp" else x.float()

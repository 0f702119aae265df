"""x * factor and x + y as operations that a recording can hold. PyTorch's are as fast on a GPU."""

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

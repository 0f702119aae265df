"""The gate of a gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:], in float32, rounded once to x's dtype.

    Args:
        x: float32, bfloat16 or float16 [T, 2 I]; the last dimension contiguous.

    Returns:
        [T, I], contiguous.
    """
    which = implementation(x)
    if which == "cpp":
        return torch.ops.vllm_cpu.silu_and_mul(x)
    if which == "triton":
        from vllm.ops.triton import silu_and_mul as kernels

        return kernels.silu_and_mul(x)
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)

"""The gate of a gated MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched


@dispatched
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:] [T, I], contiguous, computed in float32 and rounded once to x's dtype. `x` is
    float32, bfloat16 or float16 [T, 2 I], the last dimension contiguous."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)

"""Operations that callers of upstream's kernels use, over tensors that they pass for the results."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """silu of the first half of each row of x [..., 2 D], times the second, into out [..., D]."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Rows of input [..., D] divided by their root mean square, times weight [D], into out; in float32."""
    whole = input.float()
    out.copy_(whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + epsilon) * weight.float())

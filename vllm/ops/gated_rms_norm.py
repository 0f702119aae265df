"""RMSNorm of groups of a row, with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched


@dispatched
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, width: int, sigmoid: bool = False, gate_first: bool = False
) -> Tensor:
    """norm(x) * weight * act(gate), or norm(x * act(gate)) * weight if `gate_first`, in float32 and rounded once:
    [T, C], contiguous. norm divides by the root of the mean square + eps of each `width` neighbouring values.

    Args:
        x: float32, bfloat16 or float16 [T, C], the last dimension contiguous.
        gate: of x's dtype [T, C], the last dimension contiguous.
        weight: of x's dtype or float32, contiguous [C], or [width], which serves every group.
        sigmoid: act, else SiLU.
    """
    factor = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    value = x.float() * factor if gate_first else x.float()
    groups = value.unflatten(1, (-1, width))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    out = (normed * weight.float().view(-1, width)).flatten(1)
    return (out if gate_first else out * factor).to(x.dtype)

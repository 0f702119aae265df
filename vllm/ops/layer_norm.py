"""Layer normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched, implementation, triton_function


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in float32, rounded once to x's dtype;
    contiguous.

    Args:
        x: float32, bfloat16 or float16 [..., H], the last dimension contiguous.
        weight, bias: of x's dtype or both float32, contiguous [H], or, for x [T, heads, H], both [heads, H]; None = 1
            and 0.
    """
    which = implementation(x)
    if which == "reference":
        return _reference(x, weight, bias, eps)
    norm = torch.ops.vllm_cpu.layer_norm if which == "cpp" else triton_function("layer_norm", __name__)
    if x.dim() in (2, 3):
        return norm(x, weight, bias, eps)
    return norm(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


@dispatched
def fused_add_layer_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """residual += x in place, then the norm of the rounded residual, as unfused: [T, H], contiguous. `x` and
    `residual` [T, H], the last dimension contiguous, have one dtype; `weight` and `bias` [H] as for `layer_norm`."""
    residual += x
    return _reference(residual, weight, bias, eps)


def _reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = F.layer_norm(x.float(), x.shape[-1:], None, None, eps)
    if weight is not None:
        wide = wide * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)

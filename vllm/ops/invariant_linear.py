"""Products whose rows have the same bits in every batch: libraries choose the order of their sums by the shape."""

from __future__ import annotations

from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.float_linear import float_linear


def has_invariant_linear(x: Tensor) -> bool:
    """Whether products of such rows are to be `invariant_linear`: with VLLM_BATCH_INVARIANT, where Triton runs."""
    return envs.batch_invariant() and implementation(x) == "triton"


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, float_out: bool = False) -> Tensor:
    """x W^T + bias, [T, N], in x's dtype or float32, of x [T, K], whose last dimension is contiguous, weight [N, K] and
    bias [N] of one dtype. Summed in float32, in an order that follows K alone."""
    if implementation(x) == "triton":
        return triton_function("invariant_linear", __name__)(x, weight, bias, float_out)
    sums = float_linear(x, weight)
    if bias is not None:
        sums = sums + bias
    return sums if float_out else sums.to(x.dtype)

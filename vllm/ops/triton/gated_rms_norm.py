"""Triton implementation of `gated_rms_norm`: a program has one group of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.state_rows import sigmoid as _sigmoid


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, width: int, sigmoid: bool = False, gate_first: bool = False
) -> Tensor:
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    _gated_rms_norm_kernel[(rows, columns // width)](
        x,
        x.stride(0),
        gate,
        gate.stride(0),
        weight,
        0 if len(weight) == width else width,
        out,
        columns,
        width,
        eps,
        SIGMOID=sigmoid,
        GATE_FIRST=gate_first,
        BLOCK=triton.next_power_of_2(width),
    )
    return out


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,  # [T, C]
    x_stride,
    gate_ptr,  # [T, C]
    gate_stride,
    weight_ptr,  # [C], or [width]
    weight_stride,  # from group to group
    out_ptr,  # [T, C]
    columns,
    width,
    eps,
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < width
    x = tl.load(x_ptr + row * x_stride + group * width + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + group * width + i, mask=inside, other=0.0).to(tl.float32)
    factor = _sigmoid(gate)
    if not SIGMOID:
        factor = gate * factor
    if GATE_FIRST:
        x = x * factor
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    x = x * tl.load(weight_ptr + group * weight_stride + i, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        x = x * factor
    tl.store(out_ptr + row * columns + group * width + i, x.to(out_ptr.dtype.element_ty), mask=inside)

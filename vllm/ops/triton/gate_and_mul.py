"""Triton implementation of `gate_and_mul`: one pass, each value read and written once. The kernel masks the tail."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.gate_and_mul import NUMBERS, Activation

_BLOCK = 1024


def gate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    width = x.shape[1] // 2
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (len(x), triton.cdiv(width, _BLOCK))
        _gate_and_mul_kernel[grid](x, x.stride(0), out, width, ACTIVATION=NUMBERS[activation], BLOCK=_BLOCK)
    return out


# x [T, 2 * width], out [T, width]. ACTIVATION: its number in ops/gate_and_mul.py.
@triton.jit
def _gate_and_mul_kernel(x_ptr, x_stride, out_ptr, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 2:
        gated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # x / 2 (1 + tanh u) = x / (1 + e^-2u). From -12 on it is 0, and u is bounded.
        u = gate
        if ACTIVATION == 1:
            gate = tl.maximum(gate, -12.0, propagate_nan=tl.PropagateNan.ALL)
            u = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        gated = gate / (1.0 + tl.exp(-u))
    tl.store(out_ptr + row * width + column, (gated * up).to(out_ptr.dtype.element_ty), mask=mask)

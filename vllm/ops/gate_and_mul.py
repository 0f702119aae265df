"""The gate of a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function

Activation = Literal["silu", "gelu_tanh", "gelu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}
NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
"""By which the kernels know them."""


def gate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """activation(x[:, :I]) * x[:, I:] [T, I], contiguous, computed in float32 and rounded once to x's dtype. `x` is
    float32, bfloat16 or float16 [T, 2 I], the last dimension contiguous. "gelu_tanh" is GELU by a hyperbolic tangent,
    "gelu" the exact one."""
    which = implementation(x)
    if which == "cpp":
        return torch.ops.vllm_cpu.gate_and_mul(x, NUMBERS[activation])
    if which == "triton":
        return triton_function("gate_and_mul", __name__)(x, activation)
    gate, up = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)

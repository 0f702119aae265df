"""Activations of single values, in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation


def _relu2_(x: Tensor) -> Tensor:
    return x.relu_().square_()


def _quick_gelu_(x: Tensor) -> Tensor:
    wide = x.float()
    return x.copy_(wide * torch.sigmoid(1.702 * wide))


# In the order of the C++ operator's numbers.
_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(F.silu, inplace=True),
    "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
    "gelu": torch.ops.aten.gelu_,
    "relu": torch.relu_,
    "relu2": _relu2_,
    "quick_gelu": _quick_gelu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "mish": partial(F.mish, inplace=True),
}
_NUMBERS = {name: number for number, name in enumerate(_REFERENCES)}
ACTIVATIONS = tuple(_REFERENCES)
"""The names that `activation_` knows."""


def has_activation_kernel(x: Tensor) -> bool:
    """Whether a kernel of our own runs `activation_` of x: it computes a value alike wherever it stands, and PyTorch
    does not."""
    return implementation(x) == "cpp"


def activation_(x: Tensor, name: str) -> Tensor:
    """x, of which each value becomes its activation, in float32, rounded once.

    Args:
        x: float32, bfloat16 or float16, contiguous.
        name: "silu", "gelu", "gelu_tanh" (its approximation), "relu", "relu2" (its square), "quick_gelu"
            (x sigmoid(1.702 x)), "sigmoid", "tanh" or "mish".
    """
    if not has_activation_kernel(x):
        return _REFERENCES[name](x)
    torch.ops.vllm_cpu.activation_(x, _NUMBERS[name])
    return x

"""Activation functions by their config names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from vllm.ops.silu_and_mul import silu_and_mul

_GELU_TANH = partial(F.gelu, approximate="tanh")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "silu": F.silu,
}

_GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "swish": silu_and_mul}


def get_act_fn(name: str) -> Callable[[Tensor], Tensor]:
    """An elementwise activation.

    Raises:
        ValueError: `name` is not known.
    """
    return _lookup(_ACTIVATIONS, name, "activation_function")


def get_act_and_mul_fn(name: str) -> Callable[[Tensor], Tensor]:
    """An activation of a gated MLP: [T, 2 I] (gate | up) -> act(gate) * up [T, I].

    Raises:
        ValueError: `name` is not known.
    """
    return _lookup(_GATED_ACTIVATIONS, name, "hidden_act")


def _lookup(table: dict[str, Callable[[Tensor], Tensor]], name: str, field: str) -> Callable[[Tensor], Tensor]:
    if name not in table:
        raise ValueError(f"config.json: {field} must be one of {', '.join(sorted(table))}, got {name!r}")
    return table[name]

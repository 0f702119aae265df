"""Activation functions by their config names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm import envs
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
    """An elementwise activation; with VLLM_BATCH_INVARIANT=1 one whose rows do not depend on each other. ValueError for
    an unknown name."""
    function = _lookup(_ACTIVATIONS, name, "activation_function")
    rounds = function is not F.relu
    return partial(_row_by_row, function) if rounds and envs.batch_invariant() else function


def _row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[T, I] -> [T, I]. PyTorch's function for whole vectors of the flattened tensor rounds differently from that for
    the rest of a thread's share, whose place depends on T."""
    out = torch.empty_like(x)
    for row, own in zip(x.unbind(), out.unbind(), strict=True):
        own.copy_(function(row))
    return out


def get_act_and_mul_fn(name: str) -> Callable[[Tensor], Tensor]:
    """An activation of a gated MLP: [T, 2 I] (gate | up) -> act(gate) * up [T, I]. ValueError for an unknown name."""
    return _lookup(_GATED_ACTIVATIONS, name, "hidden_act")


def _lookup(table: dict[str, Callable[[Tensor], Tensor]], name: str, field: str) -> Callable[[Tensor], Tensor]:
    if name not in table:
        raise ValueError(f"config.json: {field} must be one of {', '.join(sorted(table))}, got {name!r}")
    return table[name]

"""Activation functions by their config names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed.communicator import Communicator
from vllm.ops.activation import activation_, has_activation_kernel
from vllm.ops.experts import CURVES, ExpertActivation
from vllm.ops.gate_and_mul import ACTIVATIONS, gate_and_mul

_GELU_TANH = ACTIVATIONS["gelu_tanh"]


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": _relu2,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
ACTIVATION_NAMES = frozenset(_ACTIVATIONS) | {"xielu"}
# As activation_ calls them.
_OWN: dict[Any, str] = {
    F.relu: "relu",
    _relu2: "relu2",
    F.gelu: "gelu",
    _GELU_TANH: "gelu_tanh",
    F.silu: "silu",
    _quick_gelu: "quick_gelu",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.mish: "mish",
}
SILU_AND_MUL = partial(gate_and_mul, activation="silu")
"""The module that get_act_and_mul_fn gives for "silu"; products with packed weights can have it in them."""

_GATES: dict[Any, Callable[[Tensor], Tensor]] = {
    F.silu: SILU_AND_MUL,
    F.gelu: partial(gate_and_mul, activation="gelu"),
    _GELU_TANH: partial(gate_and_mul, activation="gelu_tanh"),
}
# Exact in every order.
_UNROUNDED = (F.relu, _relu2)


def get_act_fn(name: str) -> Callable[[Tensor], Tensor]:
    """An elementwise activation whose rows do not depend on each other. ValueError for an unknown name."""
    function = _function(name)
    return function if function in _UNROUNDED else partial(_of_copy, _OWN[function], function)


def get_inplace_act_fn(name: str) -> Callable[[Tensor], Tensor]:
    """`get_act_fn` of a tensor that nothing else reads: the result may take its memory. Each page of a large result in
    new memory is a fault, which takes longer than the function."""
    return partial(activation_, name=_OWN[_function(name)])


def _function(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation must be one of {', '.join(sorted(_ACTIVATIONS))}, got {name!r}")
    return _ACTIVATIONS[name]


def _of_copy(own: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """PyTorch's function for whole vectors of the flattened tensor rounds differently from that for the rest of a
    thread's share on the CPU, whose place depends on the number of rows."""
    if not has_activation_kernel(x):
        return function(x)
    return activation_(x.clone(memory_format=torch.contiguous_format), own)


def get_act_and_mul_fn(name: str) -> Callable[[Tensor], Tensor]:
    """An activation of a gated MLP: [T, 2 I] (gate | up) -> act(gate) * up [T, I]. ValueError for an unknown name."""
    return _GATES.get(_ACTIVATIONS.get(name)) or partial(_act_and_mul, get_act_fn(name))


def get_expert_activation(name: str, clamp: tuple[float, float] | None = None, gated: bool = True) -> Any:
    """The step between an expert's products: see `experts`. `clamp` and `gated`: see MoeSpec."""
    if clamp is not None:
        slope, limit = clamp
        return ExpertActivation("silu", limit=limit, slope=slope, offset=1.0)
    curve = _OWN.get(_ACTIVATIONS.get(name))
    if curve in CURVES:
        return ExpertActivation(curve, gated)
    return get_act_and_mul_fn(name) if gated else get_act_fn(name)


class SparseActAndMul:
    """[T, 2 I] (gate | up) -> act(max(gate - bound, 0)) * up [T, I]. A token's bound leaves about 1 - `sparsity` of its
    gates, if they are normally distributed: their mean plus their standard deviation times a quantile. The ranks of
    `group` hold equal parts of the gates."""

    def __init__(self, name: str, sparsity: float, group: Communicator) -> None:
        self._function, self._group = get_act_fn(name), group
        self._quantile = NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        own = torch.stack(torch.var_mean(gate.float(), -1, correction=0))
        variances, means = self._group.all_gather(own).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        bound = (mean + variance.sqrt() * self._quantile)[:, None]
        return self._function(F.relu(gate - bound.to(gate.dtype))) * up


def _act_and_mul(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


class XIELU(nn.Module):
    """xIELU (arXiv:2411.13010), with a learned curvature for positive and one for negative inputs:
    a_p x^2 + beta x above 0, a_n (expm1(min(x, eps)) - x) + beta x else."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1), requires_grad=False)
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        positive = F.softplus(self.alpha_p)
        negative = self.beta + F.softplus(self.alpha_n)
        curve = torch.where(x > 0, positive * x * x, (torch.expm1(torch.minimum(x, self.eps)) - x) * negative)
        return curve + self.beta * x

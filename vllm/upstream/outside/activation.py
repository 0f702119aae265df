"""Upstream's activation functions as modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.layers.activation import get_act_and_mul_fn, get_act_fn


class _Gate(nn.Module):
    """[..., 2 I] (gate | up) -> act(gate) * up [..., I]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = get_act_and_mul_fn(name)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class SiluAndMul(_Gate):
    """silu(gate) * up of [..., 2 I]."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__("silu")


class GeluAndMul(_Gate):
    """gelu(gate) * up of [..., 2 I]. ValueError for an approximation other than "none" and "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GeluAndMul: approximate must be none or tanh, got {approximate!r}")
        super().__init__("gelu" if approximate == "none" else "gelu_pytorch_tanh")
        self.approximate = approximate


class MulAndSilu(nn.Module):
    """up * silu(gate) of [..., 2 I] (up | gate)."""

    def forward(self, x: Tensor) -> Tensor:
        up, gate = x.chunk(2, dim=-1)
        return up * F.silu(gate)


class SiluAndMulWithClamp(nn.Module):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of [..., 2 I]."""

    def __init__(self, swiglu_limit: float, *, compile_native: bool = True) -> None:
        super().__init__()
        self.limit = swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class SwigluOAIAndMul(nn.Module):
    """gate sigmoid(alpha gate) * (up + 1) of [..., 2 I], gates and ups in turn, both bounded by `limit`."""

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


class _Curve(nn.Module):
    """An elementwise function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = get_act_fn(name)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class NewGELU(_Curve):
    """GELU by tanh."""

    def __init__(self) -> None:
        super().__init__("gelu_new")


class FastGELU(_Curve):
    """GELU by tanh."""

    def __init__(self) -> None:
        super().__init__("gelu_fast")


class QuickGELU(_Curve):
    """x sigmoid(1.702 x)."""

    def __init__(self) -> None:
        super().__init__("quick_gelu")


class ReLUSquaredActivation(_Curve):
    """max(x, 0)^2."""

    def __init__(self) -> None:
        super().__init__("relu2")

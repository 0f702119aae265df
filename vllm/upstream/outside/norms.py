"""Upstream's norms: ours, which add a residual stream first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.layers import layernorm as ours
from vllm.ops.elementwise import added
from vllm.upstream.outside.linear import KindOfOurs
from vllm.upstream.outside.weights import fill, set_loader


class _Norm(ours.RMSNorm, metaclass=KindOfOurs):
    ours = ours.RMSNorm

    def __init__(
        self, hidden_size: int, eps: float, has_weight: bool, dtype: torch.dtype | None, offset: float
    ) -> None:
        super().__init__(hidden_size, eps, has_weight, offset=offset)
        self.hidden_size, self.variance_epsilon = hidden_size, eps
        if self.weight is not None:
            kind = torch.float32 if offset else dtype or torch.get_default_dtype()
            self.weight = nn.Parameter(torch.full((hidden_size,), 1.0, dtype=kind), requires_grad=False)
            set_loader(self.weight, self._load)

    def _load(self, param: Tensor, loaded_weight: Tensor) -> None:
        fill(self.checkpoint_slots()["weight"], loaded_weight, "RMSNorm")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:  # type: ignore[override]
        """[..., hidden_size] -> its norm; with a residual stream that of their sum, and the sum."""
        if residual is None:
            return self._rows(x)
        total = added(x.contiguous(), residual.contiguous())
        return self._rows(total), total

    def _rows(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return super().forward(rows).view(x.shape)


class RMSNorm(_Norm):
    """x / rms(x) * weight, computed in float32.

    Args:
        hidden_size: values of a row.
        eps: added to the mean of squares.
        var_hidden_size: refused, where it is another size.
        has_weight: False: the weight is 1.
        dtype: the weight's; None = the model's.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        if var_hidden_size not in (None, hidden_size):
            raise ValueError(f"RMSNorm: var_hidden_size={var_hidden_size} of {hidden_size} values is not served")
        super().__init__(hidden_size, eps, has_weight, dtype, 0.0)


class GemmaRMSNorm(_Norm):
    """x / rms(x) * (1 + weight), computed in float32."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps, True, None, 1.0)


class LayerNorm(ours.LayerNorm):
    """(x - mean) / std * weight + bias in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps, True, True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)

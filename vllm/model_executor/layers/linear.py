"""Linear layers. Weights are loaded plain, then packed once into what the device multiplies fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.linear_method import UNQUANTIZED, LinearMethod
from vllm.ops.silu_and_mul import silu_and_mul


class LinearBase(nn.Module):
    """y = x W^T + b, where W may be several of a checkpoint's matrices, stacked to be one product.

    Args:
        input_size: width of x.
        parts: checkpoint name of each stacked matrix and its rows; an unstacked layer has one.
        bias: every part has a bias.
    """

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        output_size = sum(parts.values())
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
        self.method: LinearMethod = UNQUANTIZED
        self.packed: Any

    def forward(self, x: Tensor) -> Tensor:
        """[T, input_size] -> [T, sum of the parts' rows]."""
        return self.method.apply(x, self.packed)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes, by its name within the parent: a view of the weight or bias."""
        slots: dict[str, Tensor] = {}
        start = 0
        for part, rows in self.parts.items():
            for kind in ("weight", "bias"):
                parameter = getattr(self, kind)
                if parameter is not None:
                    slots[f"{part}.{kind}"] = parameter.data[start : start + rows]
            start += rows
        return slots

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """Pack the loaded weight as `method` does and let go of the plain one."""
        self._pack(method)

    def _pack(self, method: LinearMethod, gated: bool = False) -> None:
        assert self.weight is not None
        self.method = method
        self.packed = method.pack(self.weight.data, None if self.bias is None else self.bias.data, gated=gated)
        self.weight = None
        self.bias = None


class ColumnParallelLinear(LinearBase):
    """A linear whose outputs would be split over ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class RowParallelLinear(LinearBase):
    """A linear whose inputs would be split over ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class ReplicatedLinear(LinearBase):
    """A linear that every rank would hold whole."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str) -> None:
        super().__init__(input_size, {name: output_size}, bias)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel linears of one input, computed as one product; outputs side by side."""


class GatedLinear(MergedColumnParallelLinear):
    """The first layer of a gated MLP: act(x G^T) * (x U^T), with the checkpoint's gate_proj and up_proj.

    Raises:
        ValueError: the activation is not known.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, activation: str) -> None:
        super().__init__(input_size, {"gate_proj": output_size, "up_proj": output_size}, bias)
        self.act_and_mul = get_act_and_mul_fn(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[T, input_size] -> [T, output_size]."""
        out = self.method.apply(x, self.packed)
        return out if self.packed.gated else self.act_and_mul(out)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """See LinearBase."""
        self._pack(method, gated=self.act_and_mul is silu_and_mul)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections as one product; outputs side by side, heads whole."""

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool) -> None:
        kv_size = num_kv_heads * head_dim
        super().__init__(hidden_size, {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}, bias)

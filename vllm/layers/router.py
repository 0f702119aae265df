"""The product that chooses among experts."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from vllm.layers.linear import ReplicatedLinear
from vllm.layers.linear_method import UNQUANTIZED, LinearMethod, pack_parts
from vllm.ops.elementwise import widened
from vllm.ops.rms_norm import AddedNorm


class Router(ReplicatedLinear):
    """x W^T + b in float32, [T, H] -> [T, E], which every rank computes whole. Its weight is never rounded when it is
    loaded; with `is_float32` it stays float32, whatever the model's dtype."""

    needs_whole_weight = True

    def __init__(self, hidden_size: int, num_experts: int, bias: bool, name: str, is_float32: bool = False) -> None:
        super().__init__(hidden_size, num_experts, bias, name)
        if is_float32:
            assert self.weight is not None
            self._empty = self._empty.float()
            self.weight = nn.Parameter(self.weight.float(), requires_grad=False)
            self.bias = None if self.bias is None else nn.Parameter(self.bias.float(), requires_grad=False)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        """Pack the loaded weight and free the plain one."""
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.data
        self.method, self.packed = pack_parts(self._loaded_parts(), bias, UNQUANTIZED, float_out=True)
        self._quantized.clear()
        self.weight = self.bias = None

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        if x.dtype != self._empty.dtype:
            x = widened(x)
        return self.product(partial(self.method.apply, float_out=True), x, norm)

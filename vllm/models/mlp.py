"""The MLP of a layer, as its MlpSpec says."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import XIELU, SparseActAndMul, get_inplace_act_fn
from vllm.layers.layernorm import ShardedRMSNorm
from vllm.layers.linear import ColumnParallelLinear, GatedLinear, RowParallelLinear
from vllm.layers.sharding import Shard
from vllm.models.spec import MlpSpec
from vllm.ops.rms_norm import AddedNorm


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))). Without `is_summed` each rank's result is a part of it, and the
    ranks' sum the whole."""

    def __init__(self, spec: MlpSpec, hidden_size: int, is_summed: bool = True) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.up_proj: nn.Module | None = None
        self.gate_up_proj: GatedLinear | None = None
        if spec.gated:
            self.gate_up_proj = GatedLinear(hidden_size, inner, spec.up_bias, spec.activation)
            if spec.sparsity:
                self.gate_up_proj.act_and_mul = SparseActAndMul(spec.activation, spec.sparsity, get_tp_group())
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, inner, spec.up_bias, "up_proj")
            self.act_fn = XIELU() if spec.activation == "xielu" else get_inplace_act_fn(spec.activation)
        self.sub_norm: nn.Module | None = None
        if spec.inner_norm is not None:
            group = get_tp_group()
            self.sub_norm = ShardedRMSNorm(Shard.even(inner, group), spec.inner_norm.eps, group, 1)
        self.down_proj = RowParallelLinear(inner, hidden_size, spec.down_bias, "down_proj", is_summed)

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H]."""
        if self.gate_up_proj is not None:
            inner = self.gate_up_proj(x, norm)
        else:
            assert self.up_proj is not None
            inner = self.act_fn(self.up_proj(x, norm))
        return self.down_proj(inner if self.sub_norm is None else self.sub_norm(inner))

"""The mixture of experts of a layer, as its MoeSpec says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_expert_activation
from vllm.layers.experts import Experts
from vllm.layers.router import Router
from vllm.layers.sharding import Shard, WeightSlot
from vllm.models.mlp import MLP
from vllm.models.norms import make_norm
from vllm.models.spec import MlpSpec, MoeSpec
from vllm.ops.choose_experts import choose_experts
from vllm.ops.elementwise import added, added_gated, scaled
from vllm.ops.rms_norm import AddedNorm


class Mixture(nn.Module):
    """The sum of some experts, chosen for each token, and of an MLP that all take."""

    def __init__(self, spec: MoeSpec, hidden_size: int) -> None:
        super().__init__()
        self.group = get_tp_group()
        self.choice, self.sum_scale = spec.choice, spec.sum_scale
        self.num_experts, self.has_identities = spec.num_experts, spec.num_identities > 0
        num_chosen_of = spec.num_experts + spec.num_identities
        self.gate = Router(hidden_size, num_chosen_of, spec.router_bias, "gate", spec.router_is_float32)
        self.correction: nn.Parameter | None = None
        if spec.correction:
            values = torch.zeros(num_chosen_of, dtype=torch.float32)
            self.correction = nn.Parameter(values, requires_grad=False)
        self._correction_may_lack = spec.correction_may_lack
        self.experts = Experts(
            spec.num_experts,
            hidden_size,
            spec.expert_size,
            get_expert_activation(spec.activation, spec.clamp, spec.gated),
            spec.expert_bias,
            spec.weighs_inputs,
            spec.alternates,
            spec.gated,
        )
        self.shared_experts = None if spec.shared is None else MLP(spec.shared, hidden_size, is_summed=False)
        self.shared_expert_gate: Router | None = None
        if spec.shared_gate:
            self.shared_expert_gate = Router(hidden_size, 1, False, "shared_expert_gate")
        self.output_norm = None if spec.output_norm is None else make_norm(spec.output_norm, hidden_size)
        self.output_bias: nn.Parameter | None = None
        if spec.output_bias:
            self.output_bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's correction of the choice and the bias of the sum go."""
        slots = {}
        if self.correction is not None:
            slots["gate.e_score_correction_bias"] = _whole_slot(self.correction, self._correction_may_lack)
        if self.output_bias is not None:
            slots["output_bias"] = _whole_slot(self.output_bias)
        return slots

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H]."""
        if norm is not None:
            x = norm(x)
        ids, weights = choose_experts(self.gate(x), self.choice, self.correction)
        out = self.experts(x, ids, weights)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
            out = added(out, shared) if gate is None else added_gated(out, shared, gate)
        out = self.group.all_reduce(out)
        if self.has_identities:
            own = torch.where(ids >= self.num_experts, weights, 0.0).sum(1, keepdim=True)
            out = (out + own * x).to(x.dtype)
        if self.output_bias is not None:
            out = out + self.output_bias
        if self.sum_scale != 1.0:
            out = scaled(out, self.sum_scale)
        return out if self.output_norm is None else self.output_norm(out)


def _whole_slot(values: nn.Parameter, may_lack: bool = False) -> WeightSlot:
    return WeightSlot(values.data, (Shard.whole(len(values)),), may_lack=may_lack)


class BranchedMixture(nn.Module):
    """A mixture with a `branch_norm`: its experts take the residual stream, its shared MLP the block's input."""

    def __init__(self, spec: MoeSpec, hidden_size: int) -> None:
        super().__init__()
        assert spec.branch_norm is not None and spec.shared is not None
        self.group = get_tp_group()
        self.choice = spec.choice
        self.router_norm = make_norm(spec.branch_norm, hidden_size)
        self.gate = Router(hidden_size, spec.num_experts, False, "gate")
        self.expert_scale = nn.Parameter(torch.ones(spec.num_experts, dtype=torch.float32), requires_grad=False)
        activation = get_expert_activation(spec.activation, None)
        self.input_norm = make_norm(spec.branch_norm, hidden_size)
        self.experts = Experts(spec.num_experts, hidden_size, spec.expert_size, activation)
        self.output_norm = make_norm(spec.branch_norm, hidden_size)
        self.shared_experts = MLP(spec.shared, hidden_size)
        self.shared_norm = make_norm(spec.branch_norm, hidden_size)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """The block's input and the residual stream, [T, H] -> [T, H]."""
        ids, weights = choose_experts(self.gate(self.router_norm(stream)), self.choice, None)
        out = self.experts(self.input_norm(stream), ids, weights * self.expert_scale[ids.long()])
        out = self.output_norm(self.group.all_reduce(out))
        return added(self.shared_norm(self.shared_experts(x)), out)


def make_mlp(spec: MlpSpec | MoeSpec, hidden_size: int) -> nn.Module:
    """The MLP or the mixture of `spec`."""
    if isinstance(spec, MlpSpec):
        return MLP(spec, hidden_size)
    return (Mixture if spec.branch_norm is None else BranchedMixture)(spec, hidden_size)

"""Upstream's layer of experts: ours, behind a choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_expert_activation
from vllm.layers.experts import Experts
from vllm.ops.choose_experts import ExpertChoice, choose_experts
from vllm.upstream.outside.refused import refuse_quantization
from vllm.upstream.outside.weights import set_loader

_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# A gate's activation, by upstream's name.
_ACTIVATIONS = {"silu": ("silu", None), "gelu": ("gelu", None), "swigluoai": ("silu", (1.702, 7.0))}
_Mapping = list[tuple[str, str, int, str]]


class FusedMoE(Experts):
    """E MLPs, of which each token takes `top_k`, chosen by its router's logits. The ranks have equal parts of them.

    Args:
        num_experts: E.
        top_k: experts of a token.
        hidden_size, intermediate_size: of an expert.
        reduce_results: every rank gets the sum; False: its part of it.
        renormalize: a token's weights sum to 1.
        use_grouped_topk, num_expert_group, topk_group: choose among the best groups of experts.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize) -> (weights, ids), both [T, top_k].
        scoring_func: "softmax" or "sigmoid" of the logits.
        routed_scaling_factor: factor on the weights.
        e_score_correction_bias: float32 [E], added to what is compared.
        apply_router_weight_on_input: weights multiply what an expert is given.
        activation: "silu", "gelu", or "swigluoai", whose gates and ups alternate.
        has_bias: of both products.
        prefix: the layer's name in its model.

    Raises:
        ValueError: what is not served, with what to do instead.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        pcp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        is_act_and_mul: bool = True,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        refuse_quantization(quant_config, prefix)
        others |= {"num_redundant_experts": num_redundant_experts, "enable_eplb": enable_eplb}
        if unknown := [name for name, value in others.items() if value not in (None, False, 0)]:
            raise ValueError(f"{prefix}: FusedMoE cannot do {', '.join(unknown)}: leave it out")
        if activation not in _ACTIVATIONS and not activation.startswith("relu2"):
            raise ValueError(f"{prefix}: FusedMoE has activation {', '.join(_ACTIVATIONS)}, got {activation!r}")
        if scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"{prefix}: FusedMoE has scoring_func softmax or sigmoid, got {scoring_func!r}")
        name, clamp = _ACTIVATIONS.get(activation, ("relu2", None))
        function = get_expert_activation(name, clamp, gated=is_act_and_mul)
        alternates = activation == "swigluoai"
        sizes = num_experts, hidden_size, intermediate_size
        super().__init__(*sizes, function, has_bias, apply_router_weight_on_input, alternates, is_act_and_mul)
        self.top_k, self.renormalize, self.prefix, self.layer_name = top_k, renormalize, prefix, prefix
        self.global_num_experts, self.local_num_experts = num_experts, len(self.experts.held)
        self.hidden_size, self.reduce_results = hidden_size, reduce_results
        self.intermediate_size_per_partition = intermediate_size
        self.custom_routing_function = custom_routing_function
        self.e_score_correction_bias = e_score_correction_bias
        self.group = get_tp_group()
        self.tp_size, self.tp_rank, self.ep_size, self.ep_rank = self.group.world_size, self.group.rank, 1, 0
        groups = (num_expert_group or 1, topk_group or 1) if use_grouped_topk else (1, 1)
        self._choice = ExpertChoice(
            top_k,
            "sigmoid" if scoring_func == "sigmoid" else "softmax",
            num_groups=groups[0],
            num_groups_kept=groups[1],
            group_best=1 if e_score_correction_bias is None else 2,
            renormalised=renormalize,
            scale=routed_scaling_factor,
        )
        # They have no values: an expert is packed as soon as its tensors have come.
        for each in ("w13_weight", "w2_weight", *(("w13_bias", "w2_bias") if has_bias else ())):
            self.register_parameter(each, nn.Parameter(torch.empty(0), requires_grad=False))
            set_loader(getattr(self, each), self.weight_loader)

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:  # type: ignore[override]
        """[T, H] and [T, E] -> [T, H], or this rank's part of it."""
        weights, ids = self._chosen(hidden_states, router_logits)
        out = super().forward(hidden_states, ids, weights)
        return self.group.all_reduce(out) if self.reduce_results else out

    def _chosen(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.custom_routing_function is not None:
            weights, ids = self.custom_routing_function(
                hidden_states=hidden, gating_output=logits, topk=self.top_k, renormalize=self.renormalize
            )
            return weights.float().contiguous(), ids.to(torch.int32).contiguous()
        correction = self.e_score_correction_bias
        own = None if correction is None else correction.detach().float().contiguous()
        ids, weights = choose_experts(logits.float().contiguous(), self._choice, own)
        return weights, ids

    def maybe_all_reduce_tensor_model_parallel(self, final_hidden_states: Tensor) -> Tensor:
        """The sum over the ranks."""
        return final_hidden_states if self.reduce_results else self.group.all_reduce(final_hidden_states)

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether shared experts have to sum their results over the ranks themselves: False."""
        return False

    def weight_loader(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Take a checkpoint's tensor.

        Args:
            param: w13_weight, w2_weight or their biases.
            loaded_weight: the whole tensor of one expert, or, without `expert_id`, of all of them.
            weight_name: not used.
            shard_id: "w1" (gate), "w2" (down) or "w3" (up).
            expert_id: which expert it is.

        Raises:
            ValueError: it has another shape, or there is no such expert.
        """
        kind = "bias" if any(param is self._parameters.get(name) for name in ("w13_bias", "w2_bias")) else "weight"
        tensors = {expert_id: loaded_weight} if expert_id is not None else dict(enumerate(loaded_weight))
        slots = self.checkpoint_slots()
        for expert, tensor in tensors.items():
            slot = slots.get(f"{expert}.{_PROJECTIONS[shard_id]}.{kind}")
            if slot is None or tuple(tensor.shape) != slot.shape:
                wanted = "no such expert" if slot is None else f"shape {slot.shape}"
                raise ValueError(
                    f"{self.prefix}: expert {expert} has {wanted}, got {shard_id} of shape {tuple(tensor.shape)}"
                )
            slot.fill(tensor)
        return True if return_success else None

    @classmethod
    def make_expert_params_mapping(cls, *model: Any, **names: Any) -> _Mapping:
        """See `fused_moe_make_expert_params_mapping`; former callers give no model."""
        return _mapping(*[each for each in model if not isinstance(each, nn.Module)], **names)


class SharedFusedMoE(FusedMoE):
    """FusedMoE beside experts that every token takes: it returns (their results or None, the chosen ones')."""

    def __init__(
        self,
        shared_experts: nn.Module | None,
        gate: nn.Module | None = None,
        use_overlapped: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        # In tuples: they are modules of the model already.
        self._shared, self._gate = (shared_experts,), (gate,)

    @property
    def shared_experts(self) -> nn.Module | None:
        """The experts that every token takes."""
        return self._shared[0]

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Any:  # type: ignore[override]
        """[T, H] and [T, E] -> ([T, H] or None, [T, H])."""
        (shared,) = self._shared
        beside = None if shared is None else shared(hidden_states)
        if beside is not None and self.reduce_results:
            beside = self.group.all_reduce(beside)
        return beside, super().forward(hidden_states, router_logits)


def fused_moe_make_expert_params_mapping(
    model: nn.Module,
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
) -> _Mapping:
    """For each expert's tensor (parameter's name, checkpoint's name, expert, shard): parts of names, of which the first
    is to take the second's place."""
    return _mapping(ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name, num_experts)


def _mapping(
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
    model: Any = None,
) -> _Mapping:
    names = {"w1": ckpt_gate_proj_name, "w2": ckpt_down_proj_name, "w3": ckpt_up_proj_name}
    return [
        (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
        for expert in range(num_experts)
        for shard, name in names.items()
    ]

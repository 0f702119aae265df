"""Mixtures of experts of transformers' modules: the experts' products, by our packed linears on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear_method import PARTS, QUANTIZED, UNQUANTIZED, LinearMethod, PackedPart, pack_parts
from vllm.layers.sharding import Shard, WeightSlot
from vllm.quantization.weight import QuantizedStack

EXPERTS = "vllm"
"""Our implementation's name among transformers'."""

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether a module of transformers has its experts' weights stacked, and calls the experts interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


class PackedExperts(nn.Module):
    """The experts of one layer; a rank of a tensor-parallel group holds an equal part of them, and the ranks add up."""

    def __init__(self, source: Any) -> None:
        """`source`: transformers' module, on the meta device. ValueError: it does what is not implemented."""
        super().__init__()
        self.group = get_tp_group()
        if source.has_post_expert_norm:
            raise ValueError("its experts are followed by norms of their own, which is not implemented")
        num_experts = len(source.down_proj)
        if num_experts % self.group.world_size:
            raise ValueError(f"tensor_parallel_size={self.group.world_size} does not divide its {num_experts} experts")
        self.experts = Shard.even(num_experts, self.group)
        # In a tuple, so that its weights are not this module's, too.
        self._source = (source,)
        for name, parameter in source.named_parameters(recurse=False):
            own = torch.empty(len(self.experts.held), *parameter.shape[1:])
            self.register_parameter(name, nn.Parameter(own, requires_grad=False))
        self._shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        self._like = torch.empty(0)
        self._first: list[PackedPart] = []
        self._second: list[PackedPart] = []
        # Of each expert, where its gate's and up's outputs are among those of the product, if they are not in order.
        self._orders: list[Tensor | None] = []
        # By name, what came quantised from the checkpoint, until it is packed.
        self._quantized: dict[str, QuantizedStack] = {}

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's stacked tensors go."""
        return {
            name: WeightSlot(
                parameter.data,
                (self.experts, *map(Shard.whole, parameter.shape[1:])),
                keep_stack=partial(self._keep, name) if name in _WEIGHTS else None,
            )
            for name, parameter in self.named_parameters()
        }

    def _keep(self, name: str, stack: QuantizedStack) -> None:
        (source,) = self._source
        rows, columns = self._shapes[name][1:]
        wanted = (self.experts.size, columns, rows) if source.is_transposed else (self.experts.size, rows, columns)
        if stack.shape != wanted:
            raise ValueError(f"weight {stack.source} is {stack.shape}, but config.json means {wanted}")
        held = slice(self.experts.held.start, self.experts.held.stop)
        self._quantized[name] = QuantizedStack(stack.weights[held], stack.orders and stack.orders[held])

    def begin_update(self) -> bool:
        """See LinearBase.begin_update."""
        if any(part.method in (QUANTIZED, PARTS) for part in (*self._first, *self._second)):
            raise ValueError("load_weights: the experts are quantised in the checkpoint and keep their weights")
        for name, shape in self._shapes.items():
            self.register_parameter(name, nn.Parameter(self._like.new_empty(shape), requires_grad=False))
        return True

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """Pack each expert's weights by `method` and free the plain ones."""
        (source,) = self._source
        first = "gate_up_proj" if source.has_gate else "up_proj"
        for name, packed in ((first, self._first), ("down_proj", self._second)):
            plain = getattr(self, name).data
            biases = getattr(self, f"{name}_bias").data if source.has_bias else [None] * len(plain)
            packed.clear()
            stack = self._quantized.get(name)
            orders = [None if stack is None else stack.order(index) for index in range(len(plain))]
            if packed is self._first:
                self._orders = [None if order is None else order.argsort() for order in orders]
            for index, (bias, order) in enumerate(zip(biases, orders, strict=True)):
                weights: list[Any] = [plain[index].T.contiguous() if source.is_transposed else plain[index].clone()]
                if stack is not None:
                    weights = stack.weights[index]
                if bias is not None:
                    bias = bias.clone() if order is None else bias[order]
                packed.append(PackedPart(*pack_parts(weights, bias, method)))
        self._quantized.clear()
        for name in self._shapes:
            self.register_parameter(name, None)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum: hidden [T, H], the experts of each token [T, K] and their weights [T, K]."""
        (source,) = self._source
        out = torch.zeros_like(hidden)
        places, tokens, bounds = self._by_expert(top_k_index)
        for index, expert in enumerate(self.experts.held):
            start, end = bounds[expert], bounds[expert + 1]
            if start == end:
                continue
            rows = tokens[start:end]
            first, second = self._first[index], self._second[index]
            inner = first.method.apply(hidden.index_select(0, rows), first.packed)
            if (order := self._orders[index]) is not None:
                inner = inner.index_select(1, order)
            inner = source._apply_gate(inner) if source.has_gate else source.act_fn(inner)
            result = second.method.apply(inner, second.packed)
            weights = top_k_weights.flatten().index_select(0, places[start:end])
            out.index_add_(0, rows, (result * weights[:, None]).to(out.dtype))
        return self.group.all_reduce(out)

    def _by_expert(self, top_k_index: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Places in the flattened [T, K] sorted by expert, their tokens, and where each expert's begin."""
        flat = top_k_index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts.size + 1)
        bounds = [0, *counts.cumsum(0).tolist()]
        return order, order // top_k_index.shape[1], bounds


def _run_experts(module: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
    """transformers' experts in a run without data, and on devices where they are not replaced."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(module, hidden, *routing)


def register_experts() -> None:
    """Make EXPERTS known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, _run_experts)

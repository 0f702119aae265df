"""Mixtures of experts of transformers' modules: their experts by our operation on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear_method import PARTS, QUANTIZED, UNQUANTIZED, LinearMethod, pack_expert
from vllm.layers.sharding import Shard, WeightSlot
from vllm.models.transformers.eager import FEWEST_ROWS
from vllm.ops.experts import CURVES, ExpertActivation, PackedExperts, experts
from vllm.ops.packed_linear import PackedLinear, unpack_linear
from vllm.quantization.weight import QuantizedStack, QuantizedWeight

EXPERTS = "vllm"
"""Our implementation's name among transformers'."""

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
# Modules call the numbers of a gate by these names.
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


def is_experts(module: nn.Module) -> bool:
    """Whether a module of transformers has its experts' weights stacked, and calls the experts interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


class StackedExperts(nn.Module):
    """The experts of one layer; a rank of a tensor-parallel group holds an equal part of them, and the ranks add up."""

    # See LinearBase.is_plain: an expert has memory of its own.
    is_plain = False

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
        self.activation, self._alternates = _activation(source)
        count = len(self.experts.held)
        self._first, self._second = PackedExperts.empty(count, source.has_gate), PackedExperts.empty(count)
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

    def check_update(self) -> None:
        """See LinearBase.check_update."""
        if any(apply in (QUANTIZED.apply, PARTS.apply) for apply in (*self._first.applies, *self._second.applies)):
            raise ValueError("load_weights: the experts are quantised in the checkpoint and keep their weights")

    def begin_update(self) -> bool:
        """See LinearBase.begin_update."""
        for name, shape in self._shapes.items():
            self.register_parameter(name, nn.Parameter(self._like.new_empty(shape), requires_grad=False))
        return True

    @property
    def keeps_values(self) -> bool:
        """See LinearBase.keeps_values."""
        return all(isinstance(each, PackedLinear) for each in (*self._first.packed, *self._second.packed))

    def restore_values(self) -> None:
        """See LinearBase.restore_values."""
        for name, packed in self._products().items():
            weights = getattr(self, name).data
            biases = getattr(self, f"{name}_bias").data if self._source[0].has_bias else None
            for index, rows in enumerate(self._rows(name)):
                weight, bias = unpack_linear(packed.packed[index], self._like.dtype)
                (weights[index].T if self._source[0].is_transposed else weights[index])[rows] = weight
                if biases is not None and bias is not None:
                    biases[index][rows] = bias

    def _products(self) -> dict[str, PackedExperts]:
        """By the names of their weights."""
        return {"gate_up_proj" if self._source[0].has_gate else "up_proj": self._first, "down_proj": self._second}

    def _rows(self, name: str) -> Iterator[Tensor]:
        """Each expert's places of gates, then of what they are multiplied with."""
        count, *shape = self._shapes[name]
        rows = torch.arange(shape[1] if self._source[0].is_transposed else shape[0])
        if name != "down_proj" and self._alternates:
            rows = torch.cat([rows[::2], rows[1::2]])
        return itertools.repeat(rows, count)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """Pack each expert's weights by `method` and free the plain ones."""
        (source,) = self._source
        for name, packed in self._products().items():
            plain = getattr(self, name).data
            biases = getattr(self, f"{name}_bias").data if source.has_bias else [None] * len(plain)
            stack = self._quantized.get(name)
            for index, (rows, weight, bias) in enumerate(zip(self._rows(name), plain, biases, strict=True)):
                weights: list[Any]
                if stack is None:
                    weights = [(weight.T if source.is_transposed else weight)[rows]]
                else:
                    order = stack.order(index)
                    weights = _taken(stack.weights[index], rows if order is None else order.argsort()[rows])
                own, result = pack_expert(packed, weights, None if bias is None else bias[rows], method)
                packed.put(index, result, own.apply)
        self._quantized.clear()
        for name in self._shapes:
            self.register_parameter(name, None)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum: hidden [T, H], the experts of each token [T, K] and their weights [T, K]."""
        ids, weights = top_k_index.contiguous(), top_k_weights.float().contiguous()
        start = self.experts.held.start
        return self.group.all_reduce(
            experts(hidden.contiguous(), ids, weights, self._first, self._second, self.activation, start)
        )


def _taken(weights: list[QuantizedWeight], rows: Tensor) -> list[QuantizedWeight]:
    """Rows of weights that stand below each other, in as few parts as there are in this order."""
    starts = torch.tensor([0, *(weight.shape[0] for weight in weights)]).cumsum(0)
    owners, counts = torch.unique_consecutive(torch.searchsorted(starts, rows, right=True) - 1, return_counts=True)
    pieces = zip(owners.tolist(), rows.split(counts.tolist()), strict=True)
    return [weights[owner].take_rows(own - starts[owner]) for owner, own in pieces]


def _activation(source: Any) -> tuple[ExpertActivation | Callable[[Tensor], Tensor], bool]:
    """The module's step between its products, and whether gates alternate with what they are multiplied with. It is
    found by what comes out of it: modules say it in code. One that the operation does not know stays as it is."""
    function: Callable[[Tensor], Tensor] = source._apply_gate if source.has_gate else source.act_fn
    if any(isinstance(value, nn.Module) and [*value.parameters()] for value in vars(source).values()):
        return function, False
    generator = torch.Generator().manual_seed(0)
    # Up to where curves end, and limits cut.
    inner = torch.randn(64, 32, generator=generator, dtype=torch.float32, device="cpu") * 8
    wanted = function(inner)
    for activation in _known_activations(source):
        for alternates in (False, True) if activation.gated else (False,):
            own = torch.cat([inner[:, ::2], inner[:, 1::2]], 1) if alternates else inner
            if wanted.shape == (64, own.shape[1] // (2 if activation.gated else 1)) and torch.allclose(
                activation(own), wanted, rtol=1e-5, atol=1e-5
            ):
                return activation, alternates
    return function, False


def _known_activations(source: Any) -> Iterator[ExpertActivation]:
    """The results that the operation could have with the module's numbers."""
    if not source.has_gate:
        yield from (ExpertActivation(curve, gated=False) for curve in CURVES)
        return
    limits, slopes = ({getattr(source, name, None) for name in names} - {None} for names in (_LIMITS, _SLOPES))
    for curve, limit, slope, offset in itertools.product(CURVES, (None, *limits), (1.0, *slopes), (0.0, 1.0)):
        if slope == 1 or curve == "silu":
            yield ExpertActivation(curve, limit=limit, slope=slope, offset=offset)


def run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts in a run without data, and where they are not replaced: on other devices, and on the CPU
    where they round as a trainer's do."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    from transformers.integrations.moe import grouped_mm_experts_forward

    count = hidden.shape[0]
    if hidden.device.type == "cpu" and count:
        # An expert's rows are a product of their own, which autocast leaves in float32.
        more = _rows_short_of(FEWEST_ROWS, chosen)
        hidden, weights = (torch.cat((x, x[-1:].expand(len(more), -1))) for x in (hidden, weights))
        chosen = torch.cat((chosen, more))
    return grouped_mm_experts_forward(module, hidden, chosen, weights)[:count]


def _rows_short_of(fewest: int, chosen: Tensor) -> Tensor:
    """Further rows of choices, by which every expert that is chosen [T, top_k] is so `fewest` times, or more."""
    experts, counts = chosen.unique(return_counts=True)
    lacking = experts.repeat_interleave((fewest - counts).clamp(min=0))
    return torch.cat((lacking, experts[:1].expand(-len(lacking) % chosen.shape[1]))).view(-1, chosen.shape[1])


def register_experts() -> None:
    """Make EXPERTS known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, run_experts)

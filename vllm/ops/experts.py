"""Mixtures of experts: each token through the MLPs that were chosen for it, whose results are added up by weight."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, of_device, triton_function
from vllm.ops.activation import ACTIVATIONS, activation_
from vllm.ops.int8_linear import Int8Linear
from vllm.ops.packed_linear import OWN, PackedLinear, separate_gate
from vllm.ops.quantized_linear import PackedQuantized
from vllm.ops.quantized_panels import FloatPanels, QuantizedPanels

# Kernels know them by their numbers.
CURVES = ACTIVATIONS[: ACTIVATIONS.index("quick_gelu") + 1]
"""The activations of `activation_` that experts can have."""


@dataclass(frozen=True)
class ExpertActivation:
    """The step between an expert's two products, in float32: curve(g) (u + offset) of a gate g and its u, or
    curve(u) where there is no gate.

    Attributes:
        curve: one of CURVES.
        gated: whether the first product has gates.
        limit: g is at most this, and u within [-limit, limit], before anything else; None: they are as they are.
        slope: of "silu", which is x sigmoid(slope x).
        offset: added to u.

    Raises:
        ValueError: the curve is unknown, it is not "silu" and has a slope, or something that only gates have is given
            without a gate.
    """

    curve: str = "silu"
    gated: bool = True
    limit: float | None = None
    slope: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"curve must be one of {', '.join(CURVES)}, got {self.curve!r}")
        if self.slope != 1 and self.curve != "silu":
            raise ValueError(f"slope is of curve='silu', got curve={self.curve!r} and slope={self.slope}")
        if not self.gated and (self.limit is not None or self.offset):
            raise ValueError(f"limit and offset need a gate, got limit={self.limit} and offset={self.offset}")

    def __call__(self, inner: Tensor) -> Tensor:
        """[T, 2 I] (gates, then their u), or [T, I] without gates -> float32 [T, I]."""
        wide = inner.float()
        gate, up = wide.chunk(2, dim=-1) if self.gated else (wide, None)
        if self.limit is not None and up is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        curve = activation_((gate * self.slope).contiguous(), self.curve) / self.slope
        return curve if up is None else curve * (up + self.offset)


class _Handle:
    """The C++ operator's own table of the weights, which it keeps alive."""

    def __init__(self, num_experts: int, columns: int, inner: int, gated: bool) -> None:
        self.number: int = torch.ops.vllm_cpu.make_expert_weights(num_experts, columns, inner, gated)
        # At the interpreter's end the operators may be gone before the weights.
        weakref.finalize(self, torch.ops.vllm_cpu.free_expert_weights, self.number).atexit = False

    def put(self, index: int, packed: Any) -> bool:
        """Whether the operator has the weight's layout; then it is taken."""
        ops = torch.ops.vllm_cpu
        if isinstance(packed, PackedLinear) and packed.layout in OWN:
            ops.put_expert(self.number, index, packed.weight, packed.scales, packed.bias)
        elif isinstance(packed, Int8Linear) and packed.layout == "packed":
            ops.put_int8_expert(self.number, index, packed.weight, packed.bias)
        elif isinstance(packed, PackedQuantized) and len(packed.parts) == 1:
            (part,) = packed.parts
            if isinstance(part, FloatPanels):
                ops.put_expert(self.number, index, part.panels, None, packed.bias)
            elif isinstance(part, QuantizedPanels):
                kinds = packed.int8 and part.has_integers, packed.half
                ops.put_quantized_expert(self.number, index, *part.arguments(), packed.bias, *kinds)
            else:
                return False
        else:
            return False
        return True


@dataclass
class PackedExperts:
    """The weights of all experts of a rank for one of their two products. They are packed one at a time, as they are
    read: nothing is stacked or copied here.

    Attributes:
        gated: each expert's rows are those of its gate and then as many of what its gate is multiplied with.
        packed: of each expert, what `pack_linear`, `pack_int8_linear`, `pack_quantized` or another `pack` gave.
        applies: of each expert, the product by that method: (x [T, K], packed, float_out=True) -> float32 [T, N].
        handle: for the C++ operator; None: it is made with the first weight, or a weight is not of the operator's.
        tables: of the Triton kernels.
    """

    gated: bool
    packed: list[Any]
    applies: list[Callable[..., Tensor]]
    handle: _Handle | None = field(default=None, metadata={"renewed": True})
    tables: Any = field(default=None, metadata={"renewed": True})

    @classmethod
    def empty(cls, num_experts: int, gated: bool = False) -> PackedExperts:
        """Room for `num_experts`, which `put` fills in any order."""
        return cls(gated, [None] * num_experts, [_missing] * num_experts)

    def __len__(self) -> int:
        return len(self.packed)

    def put(self, index: int, packed: Any, apply: Callable[..., Tensor]) -> None:
        """Take the weight of expert `index` (of this rank) over. One that is gated may have been packed so: see
        pack_linear. ValueError: it was, and the experts' first products have no gates."""
        if packed.gated and not self.gated:
            raise ValueError("the weight was packed with a gate, but these experts have none")
        is_first = self.handle is None and all(each is None for each in self.packed)
        self.packed[index], self.applies[index], self.tables = packed, apply, None
        if is_first and of_device("cpu") == "cpp":
            columns, inner = packed.shape
            self.handle = _Handle(len(self), columns // 2 if self.gated else columns, inner, self.gated)
        if self.handle is not None and not (packed.gated == self.gated and self.handle.put(index, packed)):
            self.handle = None

    def renew(self) -> None:
        """Make `handle` and `tables` anew: the weights are in other memory."""
        former = list(zip(self.packed, self.applies, strict=True))
        self.packed, self.applies = [None] * len(former), [_missing] * len(former)
        self.handle = self.tables = None
        for index, (packed, apply) in enumerate(former):
            if packed is not None:
                self.put(index, packed, apply)

    def multiply(self, index: int, x: Tensor) -> Tensor:
        """float32 [T, N] of x [T, K]: expert `index`'s product."""
        packed, apply = self.packed[index], self.applies[index]
        if not packed.gated:
            return apply(x, packed, float_out=True)
        half = packed.shape[0] // 2
        # Memory holds 16 rows of either half in turn, filled up.
        rows = 2 * 16 * -(-half // 16)
        product = apply(x, replace(packed, gated=False, shape=(rows, packed.shape[1])), float_out=True)
        return separate_gate(product.T, half).T


def _missing(*_: Any, **__: Any) -> Tensor:
    raise ValueError("an expert has no weights yet")


def experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: ExpertActivation | Callable[[Tensor], Tensor],
    first_expert: int = 0,
    weigh_inputs: bool = False,
) -> Tensor:
    """[T, H] in the dtype of `hidden`: for each token the sum, over its chosen experts e, of
    w second_e(activation(first_e(hidden))).

    Products are summed in float32, what is between them is rounded to the dtype of `hidden` once, and the sum over
    experts is in float32, in an order that follows the token's own ids, and rounded once. A token's bits do not depend
    on other tokens: NaN in a row of `hidden` stays in that row.

    Args:
        hidden: [T, H], float32, bfloat16 or float16; the last dimension contiguous.
        ids: int32 or int64 [T, K], contiguous: each token's experts, numbered over all ranks. Those that this rank does
            not have count as nothing: the sum of the ranks' results is that of all experts.
        weights: float32 [T, K], contiguous: what their results are multiplied by.
        first, second: this rank's experts; `first` is [I or 2 I, H], `second` [H, I], both with a bias or without.
        activation: between the products; a function of [T, I or 2 I] in the dtype of `hidden` is slower.
        first_expert: the id of the rank's first expert.
        weigh_inputs: tokens are multiplied by their weights, and rounded, before the first product; results are not.
    """
    if isinstance(activation, ExpertActivation) and activation.gated != first.gated:
        raise ValueError(f"activation has gated={activation.gated}, but the first products gated={first.gated}")
    arguments = hidden, ids, weights, first, second, activation, first_expert, weigh_inputs
    if not takes_all_experts(hidden, first, second, activation):
        may_wait = not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        return (_by_expert if may_wait else _of_all_tokens)(*arguments)
    if implementation(hidden) == "cpp":
        return _by_kernel(*arguments)
    return triton_function("experts", __name__)(*arguments)


def takes_all_experts(
    like: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: ExpertActivation | Callable[[Tensor], Tensor],
) -> bool:
    """Whether a kernel multiplies tokens of the dtype and device of `like` with all experts; else the host does so one
    by one, for which it has to learn how many tokens each has."""
    if not isinstance(activation, ExpertActivation):
        return False
    which = implementation(like)
    if which == "cpp":
        return first.handle is not None and second.handle is not None
    if which == "reference":
        return False
    can_multiply = triton_function("can_multiply", __name__)
    return can_multiply(like, first) and can_multiply(like, second)


def _by_kernel(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: Any,
    first_expert: int,
    weigh_inputs: bool,
) -> Tensor:
    assert first.handle is not None and second.handle is not None
    limit = math.inf if activation.limit is None else activation.limit
    curve = CURVES.index(activation.curve), limit, activation.slope, activation.offset
    handles = first.handle.number, second.handle.number
    return torch.ops.vllm_cpu.experts(hidden, ids, weights, *handles, *curve, first_expert, weigh_inputs)


def _by_expert(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: Callable[[Tensor], Tensor],
    first_expert: int,
    weigh_inputs: bool,
) -> Tensor:
    """The reference: expert by expert."""

    def multiply(is_first: bool, index: int, x: Tensor, tokens: Tensor) -> Tensor:
        return (first if is_first else second).multiply(index, x)

    return experts_one_by_one(hidden, ids, weights, len(first), multiply, activation, first_expert, weigh_inputs)


def experts_one_by_one(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    multiply: Callable[[bool, int, Tensor, Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
    first_expert: int = 0,
    weigh_inputs: bool = False,
) -> Tensor:
    """As `experts`, whose `num_experts` products are functions: multiply(is the first, the expert's index on this rank,
    x [T, K], the tokens of its rows int64 [T]) -> float32 [T, N]."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for index, places in enumerate(_places(ids, first_expert, num_experts)):
        if not len(places):
            continue
        tokens, own = places // ids.shape[1], weights.flatten()[places, None]
        x = hidden[tokens]
        if weigh_inputs:
            x = (x.float() * own).to(hidden.dtype)
        inner = multiply(True, index, x, tokens)
        # Functions that are not ours are written for the model's dtype.
        inner = activation(inner if isinstance(activation, ExpertActivation) else inner.to(hidden.dtype))
        result = multiply(False, index, inner.to(hidden.dtype).contiguous(), tokens)
        out.index_add_(0, tokens, result if weigh_inputs else result * own)
    return out.to(hidden.dtype)


def _of_all_tokens(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: Callable[[Tensor], Tensor],
    first_expert: int,
    weigh_inputs: bool,
) -> Tensor:
    """As `_by_expert`, where the host may not wait for the choice, as in a CUDA graph: each expert takes all tokens."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for index in range(len(first)):
        is_own = ids == first_expert + index
        own = torch.where(is_own, weights, 0.0).sum(1, keepdim=True)
        x = (hidden.float() * own).to(hidden.dtype) if weigh_inputs else hidden
        inner = first.multiply(index, x)
        inner = activation(inner if isinstance(activation, ExpertActivation) else inner.to(hidden.dtype))
        result = second.multiply(index, inner.to(hidden.dtype))
        out += torch.where(is_own.any(1, keepdim=True), result if weigh_inputs else result * own, 0.0)
    return out.to(hidden.dtype)


def _places(ids: Tensor, first_expert: int, num_experts: int) -> Sequence[Tensor]:
    """The places that each expert has in the flattened `ids`, in order."""
    flat = ids.flatten().long() - first_expert
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order, counts = flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts + 1)
    return order.split(counts.tolist())[:num_experts]

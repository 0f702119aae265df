"""Kinds of packed weights: how they are made, multiplied with and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator
from vllm.ops.experts import PackedExperts
from vllm.ops.fp8_linear import fp8_linear, takes_fp8
from vllm.ops.int8_linear import Int8Linear, int8_linear, pack_int8_linear, take_int8_rows
from vllm.ops.packed_linear import (
    OWN,
    PackedLinear,
    interleave_gate,
    pack_linear,
    packed_linear,
    separate_gate,
    take_packed_rows,
)
from vllm.ops.quantized_linear import (
    PackedQuantized,
    PlainPart,
    pack_quantized,
    quantized_linear,
    take_quantized_rows,
)
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import AddedNorm
from vllm.quantization.activations import InputQuantization, InputScale
from vllm.quantization.on_load import round_to_fp8, round_to_int4
from vllm.quantization.weight import QuantizedWeight


def keeps_quantized(name: str) -> ValueError:
    """The error for new values of the weight `name`, which came quantised from the checkpoint."""
    return ValueError(
        f"load_weights: {name} is quantised in the checkpoint and keeps its weight; load the unquantised checkpoint to "
        "change it"
    )


@dataclass(frozen=True)
class LinearMethod:
    """The three operations on a kind of packed weight, as pack_linear, packed_linear and take_packed_rows.

    Attributes:
        takes_parts: `pack` takes a weight in parts of its rows, too.
    """

    pack: Callable[..., Any]
    apply: Callable[..., Tensor]
    take_rows: Callable[[Any, Tensor], Any]
    takes_parts: bool = False


@dataclass
class PackedPart:
    """Some rows of a weight.

    Attributes:
        method: their kind.
        packed: by that method.
        inputs: what is done to the activations first.
    """

    method: LinearMethod
    packed: Any
    inputs: InputQuantization | InputScale | None = None


@dataclass
class PackedParts:
    """A weight whose rows are packed in different ways, or whose activations are rounded first.

    Attributes:
        parts: from the first row to the last.
        shape: (N, K) of all of them.
        gated: as in PackedLinear.
    """

    parts: list[PackedPart]
    shape: tuple[int, int]
    gated: bool = False

    def split_inputs(self, group: Communicator) -> None:
        """Say that this rank of `group` has a part of each token's inputs."""
        for part in self.parts:
            if part.inputs is not None:
                part.inputs = part.inputs.over(group)


def parts_linear(x: Tensor, packed: PackedParts, float_out: bool = False, norm: AddedNorm | None = None) -> Tensor:
    """As `packed_linear`, of a weight in parts."""
    if norm is not None and (len(packed.parts) > 1 or packed.parts[0].inputs is not None):
        x, norm = norm(x), None
    results = [_part_linear(x, part, float_out, norm) for part in packed.parts]
    return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def _part_linear(x: Tensor, part: PackedPart, float_out: bool, norm: AddedNorm | None) -> Tensor:
    if part.inputs is None:
        return part.method.apply(x, part.packed, float_out=float_out, norm=norm)
    if isinstance(part.inputs, InputQuantization) and part.inputs.gives_fp8_rows and takes_fp8(part.packed):
        return fp8_linear(*part.inputs.fp8_rows(x), part.packed, x.dtype, float_out)
    return part.method.apply(part.inputs(x), part.packed, float_out=float_out)


def take_parts_rows(packed: PackedParts, rows: Tensor) -> PackedParts:
    """As `take_packed_rows`, of a weight with one part."""
    (part,) = packed.parts
    own = PackedPart(part.method, part.method.take_rows(part.packed, rows), part.inputs)
    return PackedParts([own], (len(rows), packed.shape[1]))


def pack_parts(
    weights: Sequence[Tensor | QuantizedWeight],
    bias: Tensor | None,
    method: LinearMethod,
    float_out: bool = False,
    gated: bool = False,
) -> tuple[LinearMethod, Any]:
    """Pack a weight's rows, given in parts; those that are not quantised by `method`. Parts that follow each other and
    have the same settings are one product. Returns the method of the whole, and it as packed."""
    runs = _runs(weights)
    parts: list[PackedPart] = []
    start = 0
    for run in runs:
        end = start + sum(weight.shape[0] for weight in run)
        own_bias = None if bias is None else bias[start:end]
        options = {"float_out": float_out, "gated": gated and len(runs) == 1}
        start = end
        if isinstance(run[0], Tensor):
            parts.append(PackedPart(method, method.pack(torch.cat(run) if run[1:] else run[0], own_bias, **options)))
        else:
            packed = pack_quantized([weight.tensor for weight in run], own_bias, **options)
            parts.append(PackedPart(QUANTIZED, packed, run[0].inputs))
    if len(parts) == 1 and parts[0].inputs is None:
        return parts[0].method, parts[0].packed
    width = weights[0].shape[1]
    return PARTS, PackedParts(parts, (start, width), len(parts) == 1 and parts[0].packed.gated)


def takes_adapters(packed: Any) -> bool:
    """Whether a product with the packed weight takes `adapters`."""
    if isinstance(packed, PackedLinear):
        return packed.layout in OWN
    if isinstance(packed, PackedQuantized):
        return len(packed.parts) == 1 and not isinstance(packed.parts[0], PlainPart)
    return isinstance(packed, Int8Linear) and packed.scales is None


def before_gate(apply: Callable[..., Tensor], x: Tensor, packed: Any, **options: Any) -> Tensor:
    """[T, N]: apply(x, packed, **options), of a weight packed for a gate without the gate."""
    if not packed.gated:
        return apply(x, packed, **options)
    half = packed.shape[0] // 2
    (wide,) = interleave_gate(torch.empty(2 * half, device="meta")).shape
    out = apply(x, replace(packed, shape=(wide, packed.shape[1]), gated=False), **options)
    return separate_gate(out.T, half).T.contiguous()


def pack_expert(
    experts: PackedExperts, weights: Sequence[Tensor | QuantizedWeight], bias: Tensor | None, method: LinearMethod
) -> tuple[LinearMethod, Any]:
    """`pack_parts` of the weight of one of `experts`, given in parts: the gate's rows above the others, if they have a
    gate. Whole parts are taken over, and nothing else is kept."""
    # Rounded inputs are a step before the product, which the operation does not fuse.
    gated = experts.gated and all(isinstance(weight, Tensor) or weight.inputs is None for weight in weights)
    return pack_parts(weights, bias, method, gated=gated)


def _runs(weights: Sequence[Tensor | QuantizedWeight]) -> list[list[Any]]:
    """Weights that follow each other and can be one product: all plain, or all quantised with the same inputs."""

    def kind(weight: Tensor | QuantizedWeight) -> object:
        return None if isinstance(weight, Tensor) else (weight.inputs,)

    return [list(run) for _, run in groupby(weights, kind)]


def _pack_rounded(
    quantize: Callable[[Tensor], QuantizedTensor],
    weight: Tensor,
    bias: Tensor | None,
    float_out: bool = False,
    gated: bool = False,
) -> PackedQuantized:
    return pack_quantized(quantize(weight), bias, float_out, gated)


UNQUANTIZED = LinearMethod(pack_linear, packed_linear, take_packed_rows, takes_parts=True)
INT8 = LinearMethod(pack_int8_linear, int8_linear, take_int8_rows, takes_parts=True)
INT4 = LinearMethod(partial(_pack_rounded, round_to_int4), quantized_linear, take_quantized_rows)
FP8 = LinearMethod(partial(_pack_rounded, round_to_fp8), quantized_linear, take_quantized_rows)
QUANTIZED = LinearMethod(pack_quantized, quantized_linear, take_quantized_rows)
PARTS = LinearMethod(pack_parts, parts_linear, take_parts_rows)

_ON_LOAD = {"int8": INT8, "int4": INT4, "fp8": FP8}


def linear_method(quantization: str | None) -> LinearMethod:
    """The method of a `quantization` that rounds weights when they are loaded; of others, and None, the plain one."""
    return UNQUANTIZED if quantization is None else _ON_LOAD.get(quantization, UNQUANTIZED)

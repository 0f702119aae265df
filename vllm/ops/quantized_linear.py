"""Matrix products with weights that stay as their quantised format stores them: see QuantizedTensor.

Weights are widened to float32 as they are multiplied, sums are in float32, and x is in the model's dtype: a product is
that of the dequantised weight. On CPUs with float16 arithmetic bfloat16 x takes it, as with unquantised weights: see
csrc/cpu/kernels/linear_quantized_half.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.add_lora import AddedAdapters
from vllm.ops.code_planes import join_planes, split_planes
from vllm.ops.packed_linear import interleave_gate, sums_in_float16
from vllm.ops.quantized_panels import FloatPanels, Panels, QuantizedPanels, fits_panels, pack_panels
from vllm.ops.quantized_tensor import QuantizedTensor, SparseRows, can_concatenate, concatenate, plain_tensor
from vllm.ops.rms_norm import NO_NORM, AddedNorm

__all__ = [
    "PackedQuantized",
    "QuantizedTensor",
    "SparseRows",
    "concatenate",
    "pack_quantized",
    "plain_tensor",
    "quantized_embedding",
    "quantized_linear",
    "take_quantized_rows",
]

# So much of a weight is widened at a time.
_TILE_BYTES = 2**22


@dataclass
class PlainPart:
    """Rows of a weight for the PyTorch reference.

    Attributes:
        planes: uint8 [N, ceil(K bits / 8)], one tensor for each of the planes; or the float8 codes [N, K].
        rest: the weight with codes that are one, expanded to [N, K].
    """

    planes: tuple[Tensor, ...]
    rest: QuantizedTensor

    def rows(self, rows: Tensor | slice) -> QuantizedTensor:
        """W[rows], codes unpacked."""
        codes = join_planes([plane[rows] for plane in self.planes], self.rest.bits, self.rest.shape[1])
        return replace(self.rest.take_rows(rows), codes=codes)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rest.shape

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes) + self.rest.scales.nbytes

    def take_rows(self, rows: Tensor) -> PlainPart:
        return _plain([self.rows(rows)])


@dataclass
class PackedQuantized:
    """A quantised weight ready to multiply with.

    Attributes:
        parts: the weight's rows, in order: matrices of several formats may be one weight. All are plain, or none is.
        bias: [N] in the dtype of the activations, or None.
        shape, gated: as in PackedLinear.
        int8: x is rounded to 8 bits where the weight's codes are integers, see VLLM_CPU_INT8_ACTIVATIONS.
        half: products with bfloat16 are summed in float16 up to 64 at a time, see pack_linear.
    """

    parts: tuple[PlainPart | Panels, ...]
    bias: Tensor | None
    shape: tuple[int, int]
    gated: bool = False
    int8: bool = False
    half: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the weight in bytes, without bias and indices of sparse values."""
        return sum(part.nbytes for part in self.parts)


def pack_quantized(
    weight: QuantizedTensor | Sequence[QuantizedTensor],
    bias: Tensor | None,
    float_out: bool = False,
    gated: bool = False,
) -> PackedQuantized:
    """Take a weight [N, K] and a bias [N] over, without changing a value. Several weights are stacked in order; they
    need not have one format. For `float_out` and `gated` see pack_linear. ValueError: the weights have different
    widths."""
    weights = [weight] if isinstance(weight, QuantizedTensor) else list(weight)
    if len({each.shape[1] for each in weights}) != 1:
        raise ValueError(f"weights of one product must have one width, got {[each.shape for each in weights]}")
    groups = [weights] if len(weights) == 1 or can_concatenate(weights) else [[each] for each in weights]
    shape = (sum(each.shape[0] for each in weights), weights[0].shape[1])
    if implementation(weights[0].scales) != "cpp" or not all(map(fits_panels, weights)):
        return PackedQuantized(tuple(map(_plain, groups)), bias, shape)
    is_gated, rows = gated and len(groups) == 1, None
    if is_gated:
        # Rows that are filled in are not read.
        rows = interleave_gate(torch.arange(shape[0]))
        bias = None if bias is None else interleave_gate(bias)
    panels = tuple(pack_panels(group, rows) for group in groups)
    return PackedQuantized(panels, bias, shape, is_gated, envs.cpu_int8_activations(), sums_in_float16(float_out))


def quantized_linear(
    x: Tensor,
    packed: PackedQuantized,
    float_out: bool = False,
    norm: AddedNorm | None = None,
    adapters: AddedAdapters | None = None,
) -> Tensor:
    """x W^T + bias, [T, N], or [T, N / 2] when `packed.gated`; contiguous, in x's dtype or, with `float_out`, float32.

    `x` [T, K] is float32, bfloat16 or float16, with any strides. `norm` is applied to x first, and `adapters` are added
    where our kernel multiplies with a weight in one format: see packed_linear. ValueError if the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if not isinstance(packed.parts[0], PlainPart):
        return _by_panels(x, packed, float_out, norm, adapters)
    assert adapters is None
    return _by_rows(x if norm is None else norm(x), packed, float_out)


def take_quantized_rows(packed: PackedQuantized, rows: Tensor) -> PackedQuantized:
    """The weight's rows and their biases, packed as `packed` (not gated) is. `rows` are int64 [I] in [0, N), on the
    weight's device, in any order and not necessarily distinct. ValueError where the weight is stacked of several
    formats."""
    taken = _only_part(packed).take_rows(rows)
    bias = None if packed.bias is None else packed.bias[rows]
    return replace(packed, parts=(taken,), bias=bias, shape=(len(rows), packed.shape[1]))


def quantized_embedding(token_ids: Tensor, packed: PackedQuantized, dtype: torch.dtype) -> Tensor:
    """[T, H] in `dtype`: the rows of a weight [V, H] that `token_ids` (int32 or int64 [T] in [0, V)) name. ValueError
    where the weight is stacked of several formats."""
    part = _only_part(packed)
    if isinstance(part, PlainPart):
        return part.rows(token_ids.long()).dequantize().to(dtype)
    if isinstance(part, FloatPanels):
        return torch.ops.vllm_cpu.panel_rows(part.panels, token_ids, part.shape[0], _like(dtype))
    return torch.ops.vllm_cpu.quantized_rows(token_ids, *part.arguments(), *part.shape, _like(dtype))


def _by_panels(
    x: Tensor, packed: PackedQuantized, float_out: bool, norm: AddedNorm | None, adapters: AddedAdapters | None
) -> Tensor:
    if len(packed.parts) == 1:
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        return _multiply(x, packed, packed.parts[0], slice(0, columns), float_out, norm, None, adapters)
    assert adapters is None
    if norm is not None:
        x = norm(x)
    out = torch.empty(x.shape[0], packed.shape[0], dtype=torch.float32 if float_out else x.dtype)
    first = 0
    for part in packed.parts:
        _multiply(x, packed, part, slice(first, first + part.shape[0]), float_out, None, out)
        first += part.shape[0]
    return out


def _multiply(
    x: Tensor,
    packed: PackedQuantized,
    part: PlainPart | Panels,
    columns: slice,
    float_out: bool,
    norm: AddedNorm | None,
    out: Tensor | None,
    adapters: AddedAdapters | None = None,
) -> Tensor:
    """The product's `columns`, in a tensor of their own or in their place in `out`."""
    bias = packed.bias if packed.bias is None or out is None else packed.bias[columns]
    count = columns.stop - columns.start
    rest = (bias, count, float_out)
    normed = (packed.gated, *(norm or NO_NORM), out, columns.start)
    if isinstance(part, FloatPanels):
        return torch.ops.vllm_cpu.linear(x, part.panels, *rest, None, *normed, *(adapters or ()))
    assert isinstance(part, QuantizedPanels)
    int8 = packed.int8 and part.has_integers
    arguments = *part.arguments(), *rest, *normed, int8, packed.half, *(adapters or ())
    return torch.ops.vllm_cpu.linear_quantized(x, *arguments)


def _by_rows(x: Tensor, packed: PackedQuantized, float_out: bool) -> Tensor:
    products = [plain_product(x, part.planes, part.rest) for part in packed.parts if isinstance(part, PlainPart)]
    out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    if packed.bias is not None:
        out += packed.bias.float()
    return out if float_out else out.to(x.dtype)


def plain_product(x: Tensor, planes: tuple[Tensor, ...], weight: QuantizedTensor) -> Tensor:
    """float32 [T, N]: x [T, K] times the weight whose codes are the `planes`; see PlainPart."""
    if implementation(x) == "triton" and triton_function("can_multiply", __name__)(x, weight):
        return triton_function("plain_product", __name__)(x, planes, weight)
    wide, part = x.float(), PlainPart(planes, weight)
    tile = max(1, _TILE_BYTES // (4 * part.shape[1]))
    products = [wide @ part.rows(slice(first, first + tile)).dequantize().T for first in range(0, part.shape[0], tile)]
    return torch.cat(products, dim=1)


def _only_part(packed: PackedQuantized) -> PlainPart | Panels:
    if len(packed.parts) != 1:
        raise ValueError(f"rows can be taken of a weight in one format, got {len(packed.parts)}")
    return packed.parts[0]


def _plain(weights: Sequence[QuantizedTensor]) -> PlainPart:
    weight = concatenate(weights) if len(weights) > 1 else weights[0]
    codes = weight.plain_codes()
    # Nothing is left of a file that is mapped.
    if weight.is_plain and codes.device.type == "cpu":
        codes = codes.clone()
    parts: dict[str, Any] = {name: part.contiguous() for name, part in weight.parts_of_rows().items()}
    parts["codes"] = codes.new_empty(1, 1).expand(codes.shape)
    return PlainPart(split_planes(codes, weight.bits), replace(weight, **parts))


@cache
def _like(dtype: torch.dtype) -> Tensor:
    """An empty tensor whose dtype is the result's, for operators."""
    return torch.empty(0, dtype=dtype)

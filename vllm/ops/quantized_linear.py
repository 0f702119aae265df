"""Matrix products with weights that stay as their quantised format stores them: see QuantizedTensor.

Weights are widened to float32 as they are multiplied, sums are in float32, and x is in the model's dtype: a product is
that of the dequantised weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor, SparseRows, can_concatenate, concatenate
from vllm.ops.rms_norm import AddedNorm

__all__ = [
    "PackedQuantized",
    "QuantizedTensor",
    "SparseRows",
    "concatenate",
    "pack_quantized",
    "quantized_embedding",
    "quantized_linear",
    "take_quantized_rows",
]

# Bits of the planes that codes are cut into, low bits first: several codes of a plane fill a byte.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
# Of a weight that is widened at a time.
_TILE_BYTES = 2**22


@dataclass
class PackedPart:
    """Rows of a weight that are packed alike.

    Attributes:
        planes: uint8 [N, ceil(K bits / 8)], one tensor for each of the planes; or the float8 codes [N, K].
        rest: the weight with codes that are one, expanded to [N, K].
    """

    planes: tuple[Tensor, ...]
    rest: QuantizedTensor

    def rows(self, rows: Tensor | slice) -> QuantizedTensor:
        """W[rows], codes unpacked."""
        codes = _join_planes([plane[rows] for plane in self.planes], self.rest.bits, self.rest.shape[1])
        return replace(self.rest.take_rows(rows), codes=codes)


@dataclass
class PackedQuantized:
    """A quantised weight ready to multiply with.

    Attributes:
        parts: the weight's rows, in order: matrices of several formats may be one weight.
        bias: [N] in the dtype of the activations, or None.
        shape, gated: as in PackedLinear.
    """

    parts: tuple[PackedPart, ...]
    bias: Tensor | None
    shape: tuple[int, int]
    gated: bool = False


def pack_quantized(
    weight: QuantizedTensor | Sequence[QuantizedTensor],
    bias: Tensor | None,
    float_out: bool = False,
    gated: bool = False,
) -> PackedQuantized:
    """Take a weight [N, K] and a bias [N] over, without changing a value. Several weights are stacked in order; they
    need not have one format. `float_out` makes no difference; for `gated` see pack_linear. ValueError: the weights
    have different widths."""
    del float_out, gated
    weights = [weight] if isinstance(weight, QuantizedTensor) else list(weight)
    if len({each.shape[1] for each in weights}) != 1:
        raise ValueError(f"weights of one product must have one width, got {[each.shape for each in weights]}")
    if len(weights) > 1 and can_concatenate(weights):
        weights = [concatenate(weights)]
    shape = (sum(each.shape[0] for each in weights), weights[0].shape[1])
    return PackedQuantized(tuple(map(_pack, weights)), bias, shape)


def quantized_linear(
    x: Tensor, packed: PackedQuantized, float_out: bool = False, norm: AddedNorm | None = None
) -> Tensor:
    """x W^T + bias, [T, N], or [T, N / 2] when `packed.gated`; contiguous, in x's dtype or, with `float_out`, float32.

    `x` [T, K] is float32, bfloat16 or float16, with any strides. `norm` is applied to x first, see packed_linear.
    ValueError if the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if norm is not None:
        x = norm(x)
    wide = x.float()
    tile = max(1, _TILE_BYTES // (4 * packed.shape[1]))
    products = [
        wide @ part.rows(slice(first, first + tile)).dequantize().T
        for part in packed.parts
        for first in range(0, part.rest.shape[0], tile)
    ]
    out = torch.cat(products, dim=1)
    if packed.bias is not None:
        out += packed.bias.float()
    return out if float_out else out.to(x.dtype)


def take_quantized_rows(packed: PackedQuantized, rows: Tensor) -> PackedQuantized:
    """The weight's rows and their biases, packed as `packed` (not gated) is. `rows` are int64 [I] in [0, N), on the
    weight's device, in any order and not necessarily distinct. ValueError where the weight is stacked of several
    formats."""
    taken = _pack(_only_part(packed).rows(rows))
    bias = None if packed.bias is None else packed.bias[rows]
    return PackedQuantized((taken,), bias, (len(rows), packed.shape[1]))


def quantized_embedding(token_ids: Tensor, packed: PackedQuantized, dtype: torch.dtype) -> Tensor:
    """[T, H] in `dtype`: the rows of a weight [V, H] that `token_ids` (int32 or int64 [T] in [0, V)) name. ValueError
    where the weight is stacked of several formats."""
    return _only_part(packed).rows(token_ids.long()).dequantize().to(dtype)


def _only_part(packed: PackedQuantized) -> PackedPart:
    if len(packed.parts) != 1:
        raise ValueError(f"rows can be taken of a weight in one format, got {len(packed.parts)}")
    return packed.parts[0]


def _pack(weight: QuantizedTensor) -> PackedPart:
    planes = _split_planes(weight.codes, weight.bits)
    return PackedPart(planes, replace(weight, codes=weight.codes.new_empty(1, 1).expand(weight.shape)))


def _split_planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """[N, K] to [N, ceil(K b / 8)] for each plane's b bits; code i of a byte has its bits from i b on."""
    if bits == 8:
        return (codes.contiguous(),)
    planes = []
    below = 0
    for width in _PLANES[bits]:
        count = 8 // width
        part = (codes >> below) & (2**width - 1)
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % count)).unflatten(1, (-1, count))
        plane = part[:, :, 0].clone()
        for i in range(1, count):
            plane |= part[:, :, i] << (i * width)
        planes.append(plane)
        below += width
    return tuple(planes)


def _join_planes(planes: Sequence[Tensor], bits: int, inner: int) -> Tensor:
    """_split_planes undone."""
    if bits == 8:
        return planes[0]
    codes, below = None, 0
    for plane, width in zip(planes, _PLANES[bits], strict=True):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
        part = ((plane[:, :, None] >> shifts) & (2**width - 1)).flatten(1)[:, :inner] << below
        codes = part if codes is None else codes | part
        below += width
    assert codes is not None
    return codes

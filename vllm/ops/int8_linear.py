"""Matrix products with 8-bit weights and 8-bit activations, both in groups of 128 inputs with a scale each.

Each block of 64 of a weight's row, and of a row of x, is multiplied with a Hadamard matrix, which leaves their product
as it is and spreads the few huge activations over their blocks (QuaRot, arXiv:2404.00456). Then each group of two
blocks is rounded to integers in [-127, 127] with its own scale. Sums of a group's products are exact; groups are added
up in float32, in order, so a row's result does not depend on the batch. Accuracy: docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.add_lora import AddedAdapters
from vllm.ops.packed_linear import PANEL, interleave_gate, joined, shape_of
from vllm.ops.rms_norm import NO_NORM, AddedNorm

# Inputs that are rotated together, and such blocks that share a scale.
BLOCK = 64
_GROUP_BLOCKS = 2

_GREATEST = 127
# Flipping it adds 128 to a two's complement byte, or subtracts it again; the kernel multiplies unsigned bytes.
_SIGN_BIT = 128
# Groups of activations of no greater absolute value count as zero: the inverse of their scale would overflow.
_LEAST_ACTIVATION = 1e-30
# Raises a scale by enough that rounding it to bfloat16 cannot leave it below what the greatest value needs.
_ROUNDED_UP = 1 + 2**-8


@dataclass
class Int8Linear:
    """A weight of 8-bit integers, ready to multiply with.

    Attributes:
        weight: int8 [N, B, 64] with B = ceil(K / 64) when the layout is "plain"; "packed" for the C++ kernel, it is
            uint8 [ceil(N / 32), 32 (64 B + 2 G)] with the scales inside, see csrc/cpu/kernels/linear_int8.cpp.
        scales: bfloat16 [N, G] with G = ceil(B / 2) when the layout is "plain", else None.
        bias: [N] in the dtype of the activations, or None.
        shape, gated: as in PackedLinear.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    layout: Literal["plain", "packed"]
    shape: tuple[int, int]
    gated: bool = False


def pack_int8_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | None, float_out: bool = False, gated: bool = False
) -> Int8Linear:
    """Quantise a weight [N, K] (float32, bfloat16 or float16), whole or as parts of its rows, to 8 bits, with a bias
    [N]. `float_out` makes no difference; for `gated` see pack_linear. ValueError if a value is not finite."""
    shape = shape_of(weight)
    parts = [weight] if isinstance(weight, Tensor) else weight
    if implementation(parts[0]) != "cpp":
        return _arrange(*_quantise(joined(weight)), bias, shape)
    panels = torch.ops.vllm_cpu.pack_int8(parts, gated)
    _, scales = _parts(panels, shape[1])
    if not scales.isfinite().all():
        raise _not_finite()
    if gated and bias is not None:
        bias = interleave_gate(bias)
    return Int8Linear(panels, None, bias, "packed", shape, gated)


def take_int8_rows(packed: Int8Linear, rows: Tensor) -> Int8Linear:
    """The weight's rows and their biases, packed as `packed` (not gated) is: a product gives the very bits of the
    whole's columns. `rows` are int64 [I] in [0, N), on the weight's device, in any order and not necessarily
    distinct."""
    bias = None if packed.bias is None else packed.bias[rows]
    shape = (rows.shape[0], packed.shape[1])
    if packed.scales is not None:
        return _arrange(packed.weight[rows], packed.scales[rows], bias, shape)
    panels, columns = rows // PANEL, rows % PANEL
    shifted, scales = _parts(packed.weight, packed.shape[1])
    taken = shifted[panels, :, :, columns].flatten(2) ^ _SIGN_BIT
    return _arrange(taken.view(torch.int8), scales[panels, :, columns], bias, shape)


def int8_linear(
    x: Tensor,
    packed: Int8Linear,
    float_out: bool = False,
    norm: AddedNorm | None = None,
    adapters: AddedAdapters | None = None,
) -> Tensor:
    """x W^T + bias, [T, N], or [T, N / 2] when `packed.gated`; contiguous, in x's dtype or, with `float_out`, float32.

    `x` [T, K] is float32, bfloat16 or float16, with any strides; a row with NaN, infinity or absolute values above 1e36
    gives NaN alone. `norm` is applied to x first, and `adapters` multiply x before it is rounded, see packed_linear.
    ValueError if the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if packed.scales is None:
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        return torch.ops.vllm_cpu.linear_int8(
            *(x, packed.weight, packed.bias, columns, float_out, packed.gated, *(norm or NO_NORM)), *(adapters or ())
        )
    assert adapters is None
    if norm is not None:
        x = norm(x)
    return _reference(x, packed, packed.scales, float_out)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated weight's integers, int8 [N, B, 64], and their scales, bfloat16 [N, G]."""
    # Rotating both factors multiplies their product by 64.
    rotated = _rotate(_blocks(weight.float())) / BLOCK
    greatest = _greatest_of_groups(rotated)
    if not greatest.isfinite().all():
        raise _not_finite()
    scales = (greatest / _GREATEST * _ROUNDED_UP).bfloat16()
    # A group of zeros, or so nearly that the scale has no inverse, becomes zeros.
    divisors = torch.where(scales > torch.finfo(torch.bfloat16).tiny, scales.float(), torch.inf)
    return rotated.div_(_of_blocks(divisors, rotated)).round_().to(torch.int8), scales


def _not_finite() -> ValueError:
    return ValueError("quantization='int8' needs finite weights, got NaN or infinity")


def _greatest_of_groups(blocks: Tensor) -> Tensor:
    """[N, G]: the greatest absolute value of each group of [N, B, 64]; NaN where there is one."""
    greatest = torch.nn.functional.pad(blocks.abs().amax(2), (0, -blocks.shape[1] % _GROUP_BLOCKS))
    return greatest.unflatten(1, (-1, _GROUP_BLOCKS)).amax(2)


def _of_blocks(groups: Tensor, blocks: Tensor) -> Tensor:
    """[N, B, 1]: the value of [N, G] for each block of [N, B, 64]."""
    return groups.repeat_interleave(_GROUP_BLOCKS, 1)[:, : blocks.shape[1], None]


def _arrange(integers: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Int8Linear:
    """int8 [N, B, 64] and bfloat16 [N, G] in the layout that the device multiplies."""
    if implementation(integers) != "cpp":
        return Int8Linear(integers, scales, bias, "plain", shape)
    panels = _new_panels(shape)
    _put(integers, scales, panels, shape[1])
    return Int8Linear(panels, None, bias, "packed", shape)


def _new_panels(shape: tuple[int, int]) -> Tensor:
    num_panels, num_blocks = -(-shape[0] // PANEL), -(-shape[1] // BLOCK)
    size = PANEL * (BLOCK * num_blocks + 2 * -(-num_blocks // _GROUP_BLOCKS))
    return torch.ops.vllm_cpu.new_weight(num_panels * size).view(num_panels, size)


def _put(integers: Tensor, scales: Tensor, panels: Tensor, inner: int) -> None:
    """Write int8 [N, B, 64] and bfloat16 [N, G] to panels, the last one's missing rows as zeros."""
    missing = -len(integers) % PANEL
    integers = torch.nn.functional.pad(integers, (0, 0, 0, 0, 0, missing))
    scales = torch.nn.functional.pad(scales, (0, 0, 0, missing))
    to_integers, to_scales = _parts(panels, inner)
    shifted = (integers.view(torch.uint8) ^ _SIGN_BIT).view(len(panels), PANEL, -1, BLOCK // 4, 4)
    to_integers.copy_(shifted.permute(0, 2, 3, 1, 4))
    to_scales.copy_(scales.view(len(panels), PANEL, -1).transpose(1, 2))


def _parts(panels: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Views of panels: the bytes, [panels, B, 16, 32, 4], and the scales, bfloat16 [panels, G, 32]."""
    num_blocks = -(-inner // BLOCK)
    shifted, scales = panels.tensor_split((num_blocks * BLOCK * PANEL,), 1)
    shifted = shifted.unflatten(1, (num_blocks, BLOCK // 4, PANEL, 4))
    return shifted, scales.view(torch.bfloat16).unflatten(1, (-1, PANEL))


def _blocks(values: Tensor) -> Tensor:
    """[T, K] as [T, B, 64], filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _rotate(blocks: Tensor) -> Tensor:
    """[..., 64] times the Hadamard matrix, by the sums and differences that the kernel takes, in its order."""
    for step in (2**i for i in range(BLOCK.bit_length() - 1)):
        first, second = blocks.unflatten(-1, (-1, 2, step)).unbind(-2)
        blocks = torch.stack([first + second, first - second], -2).flatten(-3)
    return blocks


def _reference(x: Tensor, packed: Int8Linear, weight_scales: Tensor, float_out: bool) -> Tensor:
    blocks = _rotate(_blocks(x.float()))
    greatest = _greatest_of_groups(blocks)
    counts, limit = greatest > _LEAST_ACTIVATION, torch.full_like(greatest, _GREATEST)
    # Tensors divide exactly, as the kernel does; a number over a tensor is multiplied by a rounded inverse.
    inverses = torch.where(counts, limit / greatest, 0.0)
    scales = torch.where(counts, greatest / limit, 0.0) + (greatest * 0.0)
    whole = (blocks * _of_blocks(inverses, blocks)).round()
    out = torch.zeros(x.shape[0], packed.shape[0], device=x.device)
    groups = zip(whole.split(_GROUP_BLOCKS, 1), packed.weight.split(_GROUP_BLOCKS, 1), strict=True)
    for i, (rows, columns) in enumerate(groups):
        # float32 holds every sum of a group's products exactly.
        product = rows.flatten(1) @ columns.flatten(1).float().T
        out += product * weight_scales[:, i].float() * scales[:, i, None]
    if packed.bias is not None:
        out = out + packed.bias.float()
    return out if float_out else out.to(x.dtype)

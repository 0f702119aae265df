"""Triton implementation of `plain_product`: products of 16-bit x with codes, group by group.

A tile of codes becomes 16-bit floats, which is exact for integers and for 8-bit floats; values of a table that 16 bits
do not hold are a sum of two that they do. The matrix units' float32 sums over a block of inputs, all of one group, are
multiplied with the group's scales, so that no weight is rounded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.code_planes import PLANES
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.triton import descriptors

COLUMNS = 64
"""The columns of a product's tile."""
# Inputs of a block; the first is too many for the registers where values are split, or codes lie in two planes.
_DEPTHS = (64, 32, 16)
_INTEGERS, _TABLE, _TABLES, _E4M3, _E5M2 = range(5)
_FLOAT8 = {torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _E5M2}
# The kernels' SCALE_KIND; 0: Triton reads the scale itself.
_SCALES = {torch.float8_e4m3fn: 1, torch.float8_e8m0fnu: 2}


def can_multiply(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the kernel takes such rows and such a weight."""
    in_blocks = weight.group_size == weight.shape[1] or weight.group_size % _DEPTHS[-1] == 0
    # Matrix units round float32 inputs to TF32, and Triton uses none on Turing.
    has_units = x.dtype in (torch.bfloat16, torch.float16) and _multiplies_tiles(x.device)
    has_kernel = weight.sparse is None and not weight.is_plain and getattr(weight.offsets, "dtype", None) not in _SCALES
    return has_units and in_blocks and has_kernel and 0 not in x.shape


@lru_cache(maxsize=8)
def _multiplies_tiles(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def parts_of(planes: tuple[Tensor, ...], weight: QuantizedTensor) -> tuple[Tensor | None, ...]:
    """The tensors that `add_block` reads, contiguous, in its order from `low` on; None for what the weight lacks."""
    zeros = weight.zero_points if isinstance(weight.zero_points, Tensor) else None
    values = None if weight.values is None else weight.values.float()
    parts = (values, weight.scales, weight.offsets, zeros, weight.super_scales, weight.super_offsets)
    low, high = planes[0].view(torch.uint8), planes[-1].view(torch.uint8)
    return (low, high, *(None if part is None else _readable(part).contiguous() for part in parts))


def numbers_of(planes: tuple[Tensor, ...], weight: QuantizedTensor) -> tuple[int, ...]:
    """The numbers of `add_block`, in its order from `low_stride` on."""
    supers = [part for part in (weight.super_scales, weight.super_offsets) if part is not None]
    num_supers = supers[0].shape[1] if supers else 1
    values_stride = 0 if weight.values is None or weight.values.dim() == 1 else weight.values.shape[1]
    zero = weight.zero_points if isinstance(weight.zero_points, int) else 0
    strides = planes[0].stride(0), planes[-1].stride(0), values_stride
    return (*strides, weight.num_groups, weight.group_size, weight.num_groups // num_supers, num_supers, zero)


def options_of(x: Tensor, weight: QuantizedTensor) -> dict[str, Any]:
    """The constants of `add_block` for such rows."""
    widths = (*PLANES[weight.bits], 0)
    depths = _DEPTHS if weight.values is None and not widths[1] else _DEPTHS[1:]
    kind = _FLOAT8.get(weight.codes.dtype, _INTEGERS)
    if weight.values is not None:
        kind = _TABLE if weight.values.dim() == 1 else _TABLES
    return {
        "KIND": kind,
        "LOW_BITS": widths[0],
        "HIGH_BITS": widths[1],
        "SCALE_KIND": _SCALES.get(weight.scales.dtype, 0),
        "HAS_OFFSETS": weight.offsets is not None,
        "HAS_ZEROS": isinstance(weight.zero_points, Tensor),
        "HAS_SUPER_SCALES": weight.super_scales is not None,
        "HAS_SUPER_OFFSETS": weight.super_offsets is not None,
        "IS_SPLIT": kind in (_TABLE, _TABLES),
        "DEPTH": next((d for d in depths if weight.group_size % d == 0), depths[0]),
        # The interpreter computes with NumPy, which has no bfloat16.
        "WIDEN": triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
    }


def plain_product(x: Tensor, planes: tuple[Tensor, ...], weight: QuantizedTensor) -> Tensor:
    if weight.input_order is not None:
        x = x[:, weight.input_order]
    x = x.contiguous()
    num_rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty(num_rows, columns, dtype=torch.float32, device=x.device)
    rows = 16 if num_rows <= 16 else 64
    _quantized_linear_kernel[triton.cdiv(columns, COLUMNS), triton.cdiv(num_rows, rows)](
        *(x, num_rows, inner, out, columns),
        *(x if part is None else part for part in parts_of(planes, weight)),
        *numbers_of(planes, weight),
        **options_of(x, weight),
        ROWS=rows,
        COLUMNS=COLUMNS,
        num_warps=8 if rows == 64 and _is_blackwell() else 4,
    )
    return out


def _is_blackwell() -> bool:
    """Whether products leave their sums outside of the registers, so that four warps have too few to take them up."""
    return not triton.knobs.runtime.interpret and descriptors.architecture() // 10 == 10


def _readable(part: Tensor) -> Tensor:
    """8-bit floats, which old GPUs do not read, as their bytes."""
    return part.view(torch.uint8) if part.dtype in _SCALES else part


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear_kernel(
    x_ptr,  # [T, K]
    num_rows,
    inner,
    out_ptr,  # float32 [T, N]
    num_columns,
    low_ptr,
    high_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    zeros_ptr,
    super_scales_ptr,
    super_offsets_ptr,
    low_stride,
    high_stride,
    values_stride,
    num_groups,
    group_size,
    super_size,
    num_supers,
    zero,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUPER_SCALES: tl.constexpr,
    HAS_SUPER_OFFSETS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Beyond the last one, the last one again.
    own_column = tl.minimum(columns, num_columns - 1).to(tl.int64)
    own_row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < inner
        x = tl.load(x_ptr + own_row[:, None] * inner + k[None, :], mask=inside[None, :], other=0.0)
        sums = add_block(
            sums, x, start, k, inside, own_column, low_ptr, high_ptr, values_ptr, scales_ptr, offsets_ptr, zeros_ptr,
            super_scales_ptr, super_offsets_ptr, low_stride, high_stride, values_stride, num_groups, group_size,
            super_size, num_supers, zero, KIND, LOW_BITS, HIGH_BITS, SCALE_KIND, HAS_OFFSETS, HAS_ZEROS,
            HAS_SUPER_SCALES, HAS_SUPER_OFFSETS, IS_SPLIT, WIDEN,
        )  # fmt: skip
    places = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(places, sums, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :])


# `sums` [ROWS, COLUMNS] and the product of x [ROWS, DEPTH] with the inputs k [DEPTH], from `start` on, of the weight's
# `columns` [COLUMNS]; `inside` are those of the inputs that there are.
@triton.jit
def add_block(
    sums,
    x,
    start,
    k,
    inside,
    columns,
    low_ptr,  # uint8 [N, ceil(K LOW_BITS / 8)]
    high_ptr,  # uint8 [N, ceil(K HIGH_BITS / 8)]
    values_ptr,  # float32 [2^bits] or [N, 2^bits]
    scales_ptr,  # [N, G], as are offsets and zeros
    offsets_ptr,
    zeros_ptr,
    super_scales_ptr,  # [N, S]
    super_offsets_ptr,
    low_stride,
    high_stride,
    values_stride,
    num_groups,
    group_size,
    super_size,  # groups of a super-group
    num_supers,
    zero,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUPER_SCALES: tl.constexpr,
    HAS_SUPER_OFFSETS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    codes = _codes(low_ptr, low_stride, columns, k, inside, LOW_BITS)
    if HIGH_BITS > 0:
        codes |= _codes(high_ptr, high_stride, columns, k, inside, HIGH_BITS) << LOW_BITS
    if IS_SPLIT:
        values = tl.load(values_ptr + columns[None, :] * values_stride + codes)
    elif KIND == 3:
        values = _of_e4m3(codes)
    elif KIND == 4:
        values = (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    # Beyond K they are not NaN.
    values = tl.where(inside[:, None], values, 0.0)
    if WIDEN:
        products = tl.dot(x.to(tl.float32), values, input_precision="ieee")
    else:
        first = values.to(x.dtype)
        products = tl.dot(x, first)
        if IS_SPLIT:
            products = tl.dot(x, (values - first.to(tl.float32)).to(x.dtype), products)
    group = columns * num_groups + start // group_size
    super_group = columns * num_supers + start // group_size // super_size
    scale = _of_scale(tl.load(scales_ptr + group), SCALE_KIND)
    if HAS_SUPER_SCALES:
        scale *= tl.load(super_scales_ptr + super_group).to(tl.float32)
    sums += products * scale[None, :]
    offset = -scale * zero
    if HAS_OFFSETS:
        own_offset = tl.load(offsets_ptr + group).to(tl.float32)
        if HAS_SUPER_OFFSETS:
            own_offset *= tl.load(super_offsets_ptr + super_group).to(tl.float32)
        offset += own_offset
    if HAS_ZEROS:
        offset -= scale * tl.load(zeros_ptr + group).to(tl.float32)
    sums += tl.sum(x.to(tl.float32), axis=1)[:, None] * offset[None, :]
    return sums


# float32 of bytes, int32.
@triton.jit
def _of_e4m3(codes):
    # Beside the exponent's bias, which is 8 less than that of float16, a float16's bits.
    halves = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)


@triton.jit
def _of_scale(scale, SCALE_KIND: tl.constexpr):
    if SCALE_KIND == 1:
        return _of_e4m3(scale.to(tl.int32))
    elif SCALE_KIND == 2:
        # A float32's exponent; the least one is subnormal, the last NaN.
        code = scale.to(tl.int32)
        bits = tl.where(code == 0, 0x400000, code << 23)
        return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _codes(plane_ptr, stride, columns, k, inside, BITS: tl.constexpr):
    """int32 [DEPTH, COLUMNS] of one plane."""
    in_byte: tl.constexpr = 8 // BITS
    places = plane_ptr + columns[None, :] * stride + (k // in_byte)[:, None]
    found = tl.load(places, mask=inside[:, None], other=0).to(tl.int32)
    return (found >> (k % in_byte * BITS)[:, None]) & ((1 << BITS) - 1)

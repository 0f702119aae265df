"""Triton implementation of `plain_product`: products of 16-bit x with codes, group by group.

A tile of codes becomes 16-bit floats, which is exact for integers and for 8-bit floats; values of a table that 16 bits
do not hold are a sum of two that they do. The matrix units' float32 sums over a block of inputs, all of one group, are
multiplied with the group's scales, so that no weight is rounded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.code_planes import PLANES
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.triton import descriptors

_COLUMNS = 64
# Inputs of a block; the first is too many for the registers where values are split, or codes lie in two planes.
_DEPTHS = (64, 32, 16)
_INTEGERS, _TABLE, _TABLES, _E4M3, _E5M2 = range(5)
_FLOAT8 = {torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _E5M2}


def can_multiply(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the kernel takes such rows and such a weight."""
    in_blocks = weight.group_size == weight.shape[1] or weight.group_size % _DEPTHS[-1] == 0
    # Matrix units round float32 inputs to TF32, and Triton uses none on Turing.
    has_units = x.dtype in (torch.bfloat16, torch.float16) and _multiplies_tiles(x.device)
    return has_units and in_blocks and weight.sparse is None and not weight.is_plain and 0 not in x.shape


@lru_cache(maxsize=8)
def _multiplies_tiles(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def plain_product(x: Tensor, planes: tuple[Tensor, ...], weight: QuantizedTensor) -> Tensor:
    if weight.input_order is not None:
        x = x[:, weight.input_order]
    x = x.contiguous()
    num_rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty(num_rows, columns, dtype=torch.float32, device=x.device)
    widths = (*PLANES[weight.bits], 0)
    depths = _DEPTHS if weight.values is None and not widths[1] else _DEPTHS[1:]
    depth = next((d for d in depths if weight.group_size % d == 0), depths[0])
    low, high = planes[0].view(torch.uint8), planes[-1].view(torch.uint8)
    scales, offsets, zeros = (_readable(part) for part in (weight.scales, weight.offsets, weight.zero_points))
    values, values_stride = x, 0
    kind = _FLOAT8.get(weight.codes.dtype, _INTEGERS)
    if weight.values is not None:
        values = weight.values.float().contiguous()
        kind, values_stride = (_TABLE, 0) if values.dim() == 1 else (_TABLES, values.shape[1])
    rows = 16 if num_rows <= 16 else 64
    supers = [part for part in (weight.super_scales, weight.super_offsets) if part is not None]
    _quantized_linear_kernel[triton.cdiv(columns, _COLUMNS), triton.cdiv(num_rows, rows)](
        *(x, num_rows, inner, low, high, low.stride(0), high.stride(0), values, values_stride),
        *(x if scales is None else scales, x if offsets is None else offsets, x if zeros is None else zeros),
        *(x if weight.super_scales is None else weight.super_scales.contiguous(),),
        *(x if weight.super_offsets is None else weight.super_offsets.contiguous(),),
        *(out, columns, weight.num_groups, weight.group_size),
        *(weight.num_groups // supers[0].shape[1] if supers else 1, supers[0].shape[1] if supers else 1),
        weight.zero_points if isinstance(weight.zero_points, int) else 0,
        KIND=kind,
        LOW_BITS=widths[0],
        HIGH_BITS=widths[1],
        HAS_OFFSETS=offsets is not None,
        HAS_ZEROS=zeros is not None,
        HAS_SUPER_SCALES=weight.super_scales is not None,
        HAS_SUPER_OFFSETS=weight.super_offsets is not None,
        IS_SPLIT=kind in (_TABLE, _TABLES),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        DEPTH=depth,
        # The interpreter computes with NumPy, which has no bfloat16.
        WIDEN=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        num_warps=8 if rows == 64 and _is_blackwell() else 4,
    )
    return out


def _is_blackwell() -> bool:
    """Whether products leave their sums outside of the registers, so that four warps have too few to take them up."""
    return not triton.knobs.runtime.interpret and descriptors.architecture() // 10 == 10


def _readable(part: Tensor | int | None) -> Tensor | None:
    """Contiguous; 8-bit floats, which old GPUs do not read, as 16-bit ones, exactly."""
    if part is None or isinstance(part, int):
        return None
    if part.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        part = part.bfloat16()
    return part.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear_kernel(
    x_ptr,  # [T, K]
    num_rows,
    inner,
    low_ptr,  # uint8 [N, ceil(K LOW_BITS / 8)]
    high_ptr,  # uint8 [N, ceil(K HIGH_BITS / 8)]
    low_stride,
    high_stride,
    values_ptr,  # float32 [2^bits] or [N, 2^bits]
    values_stride,
    scales_ptr,  # [N, G], as are offsets and zeros
    offsets_ptr,
    zeros_ptr,
    super_scales_ptr,  # [N, S]
    super_offsets_ptr,
    out_ptr,  # float32 [T, N]
    num_columns,
    num_groups,
    group_size,
    super_size,  # groups of a super-group
    num_supers,
    zero,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUPER_SCALES: tl.constexpr,
    HAS_SUPER_OFFSETS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
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
        codes = _codes(low_ptr, low_stride, own_column, k, inside, LOW_BITS)
        if HIGH_BITS > 0:
            codes |= _codes(high_ptr, high_stride, own_column, k, inside, HIGH_BITS) << LOW_BITS
        if IS_SPLIT:
            values = tl.load(values_ptr + own_column[None, :] * values_stride + codes)
        elif KIND == 3:
            # Beside the exponent's bias, which is 8 less than that of float16, a float16's bits.
            halves = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
            values = tl.where((codes & 0x7F) == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)
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
        group = own_column * num_groups + start // group_size
        super_group = own_column * num_supers + start // group_size // super_size
        scale = tl.load(scales_ptr + group).to(tl.float32)
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
    places = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(places, sums, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :])


@triton.jit
def _codes(plane_ptr, stride, columns, k, inside, BITS: tl.constexpr):
    """int32 [DEPTH, COLUMNS] of one plane."""
    in_byte: tl.constexpr = 8 // BITS
    places = plane_ptr + columns[None, :] * stride + (k // in_byte)[:, None]
    found = tl.load(places, mask=inside[:, None], other=0).to(tl.int32)
    return (found >> (k % in_byte * BITS)[:, None]) & ((1 << BITS) - 1)

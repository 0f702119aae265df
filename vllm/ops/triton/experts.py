"""Triton implementation of `experts`: four launches, whatever was chosen, and no word to the host.

1. A program an expert finds its choices and where they begin among all that are sorted by expert.
2. First products, by tiles of rows of one expert, with what is between the products done to their sums; of quantised
   weights (quantized_experts.py) that is a launch of its own.
3. Second products, by tiles as well, times the tokens' weights; a row is written to its choice's place.
4. The sum of each token's rows.

Tiles of few rows take no longer than small ones would: what takes time then is to fetch the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.experts import CURVES, ExpertActivation, PackedExperts
from vllm.ops.packed_linear import PackedLinear
from vllm.ops.quantized_linear import PackedQuantized
from vllm.ops.triton import quantized_experts
from vllm.ops.triton.expert_tiles import COLUMNS, ROWS, num_tiles, rows_of_tile

# Elements that weights begin at multiples of.
_ALIGNED = 16
# Choices that a program looks at at a time.
_SEARCHED = 1024
# Results that are added up at a time take so much; tokens with more are taken in turns.
_RESULT_BYTES = 256 * 2**20


class Tables(NamedTuple):
    """Where the experts' weights are, found once for all: there may be hundreds.

    Attributes:
        address: of the first one: if it has moved, all have.
        offsets: int64 [E], in elements from the first one on, multiples of _ALIGNED.
        biases: [E, N], or None.
    """

    address: int
    dtype: torch.dtype
    offsets: Tensor | None
    biases: Tensor | None


def can_multiply(hidden: Tensor, packed: PackedExperts) -> bool:
    """Whether all weights are plain and of the tokens' dtype, or quantised alike by a format that its kernel takes, and
    the device multiplies tiles: Triton uses no matrix units on Turing."""
    if isinstance(packed.packed[0], PackedQuantized):
        return quantized_experts.can_multiply(hidden, packed)
    return _tables(packed).offsets is not None and _tables(packed).dtype == hidden.dtype


def _tables(packed: PackedExperts) -> Tables:
    first = packed.packed[0]
    if not isinstance(first, PackedLinear):
        return Tables(0, torch.uint8, None, None)
    address = first.weight.data_ptr()
    if packed.tables is None or packed.tables.address != address:
        packed.tables = _make_tables(packed.packed, address)
    return packed.tables


def _make_tables(packed: list[Any], address: int) -> Tables:
    weight, bias = packed[0].weight, packed[0].bias
    tables = Tables(address, weight.dtype, None, None)
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return tables
    unit = _ALIGNED * weight.element_size()
    offsets = []
    for each in packed:
        is_alike = isinstance(each, PackedLinear) and each.layout == "plain" and (each.bias is None) == (bias is None)
        if not is_alike or each.weight.dtype != weight.dtype or not each.weight.is_contiguous():
            return tables
        offsets.append(each.weight.data_ptr() - address)
    if any(offset % unit for offset in offsets):
        return tables
    in_elements = torch.tensor(offsets, dtype=torch.int64, device=weight.device) // weight.element_size()
    return tables._replace(
        offsets=in_elements, biases=None if bias is None else torch.stack([each.bias for each in packed])
    )


def experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: ExpertActivation,
    first_expert: int,
    weigh_inputs: bool,
) -> Tensor:
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    turn = max(1, _RESULT_BYTES // (4 * hidden.shape[1] * max(1, ids.shape[1])))
    for start in range(0, len(hidden), turn):
        rows = slice(start, start + turn)
        some = hidden[rows], ids[rows], weights[rows]
        _some_experts(*some, first, second, activation, first_expert, weigh_inputs, out[rows])
    return out


def _some_experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: PackedExperts,
    second: PackedExperts,
    activation: ExpertActivation,
    first_expert: int,
    weigh_inputs: bool,
    out: Tensor,
) -> None:
    num_experts, count, top_k, width = len(first), ids.numel(), ids.shape[1], hidden.shape[1]
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    places = torch.empty(count, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](ids, starts, places, count, first_expert, num_experts, BLOCK=_SEARCHED)
    rows = starts, places, num_experts
    size = first.packed[0].shape[0] // (2 if first.gated else 1)
    inner = torch.empty((count, size), dtype=hidden.dtype, device=hidden.device)
    results = torch.empty((count, width), dtype=torch.float32, device=hidden.device)
    if isinstance(first.packed[0], PackedQuantized):
        products = quantized_experts.first_products(hidden, weights if weigh_inputs else None, top_k, first, rows)
        _activate_kernel[(count, triton.cdiv(size, 1024))](
            products, inner, size, *_numbers(activation), **_constants(activation), BLOCK=1024
        )
    else:
        _first_products(hidden, weights, top_k, first, rows, activation, weigh_inputs, inner)
    if isinstance(second.packed[0], PackedQuantized):
        quantized_experts.second_products(inner, None if weigh_inputs else weights, second, rows, results)
    else:
        _second_products(inner, weights, top_k, second, rows, weigh_inputs, results)
    _sum_kernel[(len(ids), triton.cdiv(width, 1024))](
        results, ids, out, width, first_expert, num_experts, TOP_K=top_k, BLOCK=1024
    )


def _numbers(activation: ExpertActivation) -> tuple[float, float, float]:
    return 0.0 if activation.limit is None else activation.limit, activation.slope, activation.offset


def _constants(activation: ExpertActivation) -> dict[str, Any]:
    curve = CURVES.index(activation.curve)
    return {"GATED": activation.gated, "CURVE": curve, "LIMITED": activation.limit is not None}


def _options(x: Tensor, top_k: int, num_experts: int) -> dict[str, Any]:
    """The arguments that the kernels of both plain products take."""
    return {
        "TOP_K": top_k,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        # Deeper tiles of float32, which has no matrix units, spill registers.
        "DEPTH": 64 if x.element_size() == 2 else 16,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "ALIGNED": _ALIGNED,
        "WIDEN": triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        "num_warps": 4,
        "num_stages": 3,
    }


def _first_products(
    hidden: Tensor,
    weights: Tensor,
    top_k: int,
    first: PackedExperts,
    rows: tuple[Tensor, Tensor, int],
    activation: ExpertActivation,
    weigh_inputs: bool,
    inner: Tensor,
) -> None:
    count, size = inner.shape
    _first_kernel[(num_tiles(count, len(first)), triton.cdiv(size, COLUMNS))](
        *(hidden, hidden.stride(0), weights, first.packed[0].weight, *_tables(first)[2:], *rows),
        *(inner, hidden.shape[1], size, *_numbers(activation)),
        WEIGHED=weigh_inputs,
        **_constants(activation),
        **_options(hidden, top_k, len(first)),
    )


def _second_products(
    inner: Tensor,
    weights: Tensor,
    top_k: int,
    second: PackedExperts,
    rows: tuple[Tensor, Tensor, int],
    weigh_inputs: bool,
    results: Tensor,
) -> None:
    count, width = results.shape
    _second_kernel[(num_tiles(count, len(second)), triton.cdiv(width, COLUMNS))](
        *(inner, weights, second.packed[0].weight, *_tables(second)[2:], *rows, results, inner.shape[1], width),
        WEIGHED=not weigh_inputs,
        **_options(inner, top_k, len(second)),
    )


# ids [n]; starts [E + 1]; places [n]: those of the choices of expert 0, of expert 1 ...
@triton.jit(do_not_specialize=["count", "first_expert"])
def _sort_kernel(ids_ptr, starts_ptr, places_ptr, count, first_expert, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    below = 0
    for first in range(0, count, BLOCK):
        ids = tl.load(ids_ptr + first + offsets, mask=first + offsets < count, other=-1).to(tl.int32)
        ids = tl.where(first + offsets < count, ids - first_expert, -1)
        below += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, below)
    for first in range(0, count, BLOCK):
        ids = tl.load(ids_ptr + first + offsets, mask=first + offsets < count, other=-1).to(tl.int32)
        own = (first + offsets < count) & (ids - first_expert == expert)
        before = tl.cumsum(own.to(tl.int32), axis=0)
        tl.store(places_ptr + below + before - 1, first + offsets, mask=own)
        below += tl.sum(own.to(tl.int32), axis=0)
    if expert == num_experts - 1:
        tl.store(starts_ptr + num_experts, below)


# x sigmoid(slope x), or what CURVE numbers in ops/activation.py.
@triton.jit
def _curve(x, slope, CURVE: tl.constexpr):
    if CURVE == 0:
        return x / (1.0 + tl.exp(-slope * x))
    elif CURVE == 1:
        bounded = tl.maximum(x, -12.0, propagate_nan=tl.PropagateNan.ALL)
        return bounded / (1.0 + tl.exp(-1.5957691216057308 * bounded * (1.0 + 0.044715 * bounded * bounded)))
    elif CURVE == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CURVE == 5:
        return x / (1.0 + tl.exp(-1.702 * x))
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CURVE == 4:
        return positive * positive
    return positive


# The step between the products works on float32 sums.
@triton.jit
def _activated(gate, up, limit, slope, offset, GATED: tl.constexpr, CURVE: tl.constexpr, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    value = _curve(gate, slope, CURVE)
    if GATED:
        value = value * (up + offset)
    return value


# products float32 [n, I or 2 I], inner [n, I]
@triton.jit(do_not_specialize=["limit", "slope", "offset"])
def _activate_kernel(
    products_ptr,
    inner_ptr,
    num_columns,
    limit,
    slope,
    offset,
    GATED: tl.constexpr,
    CURVE: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = products_ptr + row * num_columns * (2 if GATED else 1) + column
    gate = tl.load(at, mask=column < num_columns, other=0.0)
    up = tl.load(at + num_columns, mask=column < num_columns, other=0.0) if GATED else gate
    value = _activated(gate, up, limit, slope, offset, GATED, CURVE, LIMITED)
    tl.store(inner_ptr + row * num_columns + column, value.to(inner_ptr.dtype.element_ty), mask=column < num_columns)


# hidden [T, H], weights [T, K], offsets [E] of weights [N, H], biases [E, N], inner [n, I]
@triton.jit(do_not_specialize=["limit", "slope", "offset"], do_not_specialize_on_alignment=["hidden_ptr"])
def _first_kernel(
    hidden_ptr,
    hidden_stride,
    weights_ptr,
    weight_ptr,
    offsets_ptr,
    biases_ptr,
    starts_ptr,
    places_ptr,
    num_experts,
    inner_ptr,
    num_depth,
    num_columns,
    limit,
    slope,
    offset,
    GATED: tl.constexpr,
    CURVE: tl.constexpr,
    LIMITED: tl.constexpr,
    WEIGHED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    expert, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_experts, ROWS, EXPERTS_BLOCK)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, ROWS)
    place = tl.load(places_ptr + tl.minimum(row, end - 1))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    weight_ptr += tl.multiple_of(tl.load(offsets_ptr + expert), ALIGNED)
    left_ptr = hidden_ptr + (place // TOP_K).to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    clamped = tl.minimum(column, num_columns - 1).to(tl.int64)
    gate_ptr = weight_ptr + clamped[None, :] * num_depth + depth[:, None]
    up_ptr = weight_ptr + (clamped + num_columns)[None, :] * num_depth + depth[:, None]
    token_weight = tl.load(weights_ptr + place)
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_depth, DEPTH):
        inside = first + depth < num_depth
        left = tl.load(left_ptr, mask=inside[None, :], other=0.0)
        if WEIGHED:
            left = (left.to(tl.float32) * token_weight[:, None]).to(hidden_ptr.dtype.element_ty)
        right = tl.load(gate_ptr, mask=inside[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        gate = tl.dot(left, right, gate, input_precision="ieee")
        if GATED:
            right = tl.load(up_ptr, mask=inside[:, None], other=0.0)
            if WIDEN:
                right = right.to(tl.float32)
            up = tl.dot(left, right, up, input_precision="ieee")
        left_ptr += DEPTH
        gate_ptr += DEPTH
        up_ptr += DEPTH
    if biases_ptr is not None:
        bias_ptr = biases_ptr + expert * num_columns * (2 if GATED else 1) + clamped
        gate += tl.load(bias_ptr).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + num_columns).to(tl.float32)[None, :]
    value = _activated(gate, up, limit, slope, offset, GATED, CURVE, LIMITED)
    at = inner_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, value.to(inner_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < num_columns)[None, :])


# inner [n, I], weights [T, K], offsets [E] of weights [H, I], biases [E, H], results [n, H]
@triton.jit
def _second_kernel(
    inner_ptr,
    weights_ptr,
    weight_ptr,
    offsets_ptr,
    biases_ptr,
    starts_ptr,
    places_ptr,
    num_experts,
    results_ptr,
    num_depth,
    num_columns,
    WEIGHED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    expert, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_experts, ROWS, EXPERTS_BLOCK)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, ROWS)
    clamped_row = tl.minimum(row, end - 1)
    place = tl.load(places_ptr + clamped_row)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    clamped = tl.minimum(column, num_columns - 1).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    weight_ptr += tl.multiple_of(tl.load(offsets_ptr + expert), ALIGNED)
    left_ptr = inner_ptr + clamped_row.to(tl.int64)[:, None] * num_depth + depth[None, :]
    right_ptr = weight_ptr + clamped[None, :] * num_depth + depth[:, None]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_depth, DEPTH):
        inside = first + depth < num_depth
        left = tl.load(left_ptr, mask=inside[None, :], other=0.0)
        right = tl.load(right_ptr, mask=inside[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        left_ptr += DEPTH
        right_ptr += DEPTH
    if biases_ptr is not None:
        sums += tl.load(biases_ptr + expert * num_columns + clamped).to(tl.float32)[None, :]
    if WEIGHED:
        sums = sums * tl.load(weights_ptr + place)[:, None]
    at = results_ptr + place.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, sums, mask=(row < end)[:, None] & (column < num_columns)[None, :])


# results [T, K, H], ids [T, K], out [T, H]
@triton.jit(do_not_specialize=["first_expert"], do_not_specialize_on_alignment=["out_ptr"])
def _sum_kernel(
    results_ptr, ids_ptr, out_ptr, width, first_expert, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k).to(tl.int32) - first_expert
        experts = tl.where(column < width, expert, -1)
        at = results_ptr + (token * TOP_K + k) * width + column
        total += tl.load(at, mask=(experts >= 0) & (experts < num_experts), other=0.0)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)

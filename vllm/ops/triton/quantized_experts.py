"""Products of rows that are sorted by expert with quantised weights, which `quantized_linear`'s kernel has blocks of.

A tile's expert is found by the numbers of rows, and its weight's parts by their distances from the first expert's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.experts import PackedExperts
from vllm.ops.quantized_linear import PackedQuantized, PlainPart
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.triton import quantized_linear
from vllm.ops.triton.expert_tiles import COLUMNS, ROWS, num_tiles, rows_of_tile
from vllm.ops.triton.quantized_linear import add_block, numbers_of, options_of, parts_of

_NUM_PARTS = tl.constexpr(10)
"""The parts that `parts_of` gives, the bias and the order of inputs."""


class Tables(NamedTuple):
    """Where the experts' weights are, found once for all.

    Attributes:
        address: of the first one's codes: if they have moved, all have.
        firsts: the first expert's parts, None where no expert has one.
        offsets: int64 [E, _NUM_PARTS], in elements from the first's part on; None: they are not alike.
        numbers: see `numbers_of`.
        kept: all experts' parts.
    """

    address: int
    firsts: tuple[Tensor | None, ...] = ()
    offsets: Tensor | None = None
    numbers: tuple[int, ...] = ()
    kept: list[tuple[Tensor | None, ...]] | None = None


def can_multiply(x: Tensor, packed: PackedExperts) -> bool:
    """Whether all weights are of one format, and one that the kernel takes for rows such as those of x."""
    part = _part(packed.packed[0])
    if part is None or not quantized_linear.can_multiply(x.new_empty(1, 1), part.rest):
        return False
    return _tables(packed).offsets is not None


def _part(packed: Any) -> PlainPart | None:
    """The weight, if it is of one format."""
    parts = packed.parts if isinstance(packed, PackedQuantized) else ()
    return parts[0] if len(parts) == 1 and isinstance(parts[0], PlainPart) else None


def _tables(packed: PackedExperts) -> Tables:
    first = _part(packed.packed[0])
    assert first is not None
    address = first.planes[0].data_ptr()
    if packed.tables is None or packed.tables.address != address:
        packed.tables = _make_tables(packed, address)
    return packed.tables


def _make_tables(packed: PackedExperts, address: int) -> Tables:
    kept, kinds = [], set()
    for each in packed.packed:
        part = _part(each)
        if part is None:
            return Tables(address)
        own = (*parts_of(part.planes, part.rest), each.bias, part.rest.input_order)
        kinds.add((each.shape, numbers_of(part.planes, part.rest), *map(_kind, own), part.rest.codes.dtype))
        kept.append(own)
    if len(kinds) > 1:
        return Tables(address)
    distances = [[_distance(*pair) for pair in zip(own, kept[0], strict=True)] for own in kept]
    if any(rest for row in distances for _, rest in row):
        return Tables(address)
    device = packed.packed[0].parts[0].planes[0].device
    offsets = torch.tensor([[elements for elements, _ in row] for row in distances], device=device)
    return Tables(address, kept[0], offsets, kinds.pop()[1], kept)


def _distance(part: Tensor | None, first: Tensor | None) -> tuple[int, int]:
    """From the first one on, in elements, and what is left over in bytes."""
    if part is None or first is None:
        return 0, 0
    return divmod(part.data_ptr() - first.data_ptr(), part.element_size())


def _kind(part: Tensor | None) -> object:
    return None if part is None else (part.dtype, part.shape)


def first_products(
    hidden: Tensor, weights: Tensor | None, top_k: int, packed: PackedExperts, rows: tuple[Tensor, Tensor, int]
) -> Tensor:
    """float32 [n, N], sorted by expert: rows of `hidden` [T, H], by the tokens' `weights` if there are any."""
    out = torch.empty(len(rows[1]), packed.packed[0].shape[0], dtype=torch.float32, device=hidden.device)
    _multiply(hidden, weights, packed, rows, out, TOP_K=top_k, IS_FIRST=True)
    return out


def second_products(
    inner: Tensor, weights: Tensor | None, packed: PackedExperts, rows: tuple[Tensor, Tensor, int], out: Tensor
) -> None:
    """Products of `inner` [n, I], sorted by expert, times `weights`, into their places in `out`, float32 [n, H]."""
    _multiply(inner, weights, packed, rows, out, TOP_K=1, IS_FIRST=False)


def _multiply(
    x: Tensor,
    weights: Tensor | None,
    packed: PackedExperts,
    rows: tuple[Tensor, Tensor, int],
    out: Tensor,
    **options: Any,
) -> None:
    tables, weight = _tables(packed), packed.packed[0].parts[0].rest
    assert isinstance(weight, QuantizedTensor)
    count, columns = out.shape
    *parts, bias, order = tables.firsts
    _grouped_quantized_kernel[(num_tiles(count, len(packed)), triton.cdiv(columns, COLUMNS))](
        *(x, x.stride(0), x if weights is None else weights, *rows, out, x.shape[1], columns),
        *(tables.offsets, *(x if part is None else part for part in (*parts, bias, order)), *tables.numbers),
        HAS_BIAS=bias is not None,
        HAS_ORDER=order is not None,
        WEIGHED=weights is not None,
        **options,
        **options_of(x, weight),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        EXPERTS_BLOCK=triton.next_power_of_2(len(packed)),
        # With four, sums, codes and values spill registers.
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["x_ptr"])
def _grouped_quantized_kernel(
    x_ptr,  # [T, K] if IS_FIRST, else [n, K]
    x_stride,
    weights_ptr,  # float32 [T, TOP_K]
    starts_ptr,
    places_ptr,
    num_experts,
    out_ptr,  # float32 [n, N]
    inner,
    num_columns,
    part_offsets_ptr,  # int64 [E, _NUM_PARTS], from the next ones on
    low_ptr,
    high_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    zeros_ptr,
    super_scales_ptr,
    super_offsets_ptr,
    bias_ptr,  # [N]
    order_ptr,  # int64 [K]
    low_stride,
    high_stride,
    values_stride,
    num_groups,
    group_size,
    super_size,
    num_supers,
    zero,
    HAS_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    WEIGHED: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
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
    EXPERTS_BLOCK: tl.constexpr,
):
    expert, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_experts, ROWS, EXPERTS_BLOCK)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, ROWS)
    place = tl.load(places_ptr + tl.minimum(row, end - 1))
    if WEIGHED:
        token_weight = tl.load(weights_ptr + place)
    own_row = place // TOP_K if IS_FIRST else tl.minimum(row, end - 1)
    x_ptr += own_row.to(tl.int64)[:, None] * x_stride
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Beyond the last one, the last one again.
    own_column = tl.minimum(columns, num_columns - 1).to(tl.int64)
    part_offsets_ptr += expert * _NUM_PARTS
    low_ptr += tl.load(part_offsets_ptr)
    high_ptr += tl.load(part_offsets_ptr + 1)
    values_ptr += tl.load(part_offsets_ptr + 2)
    scales_ptr += tl.load(part_offsets_ptr + 3)
    offsets_ptr += tl.load(part_offsets_ptr + 4)
    zeros_ptr += tl.load(part_offsets_ptr + 5)
    super_scales_ptr += tl.load(part_offsets_ptr + 6)
    super_offsets_ptr += tl.load(part_offsets_ptr + 7)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < inner
        if HAS_ORDER:
            from_k = tl.load(order_ptr + tl.load(part_offsets_ptr + 9) + k, mask=inside, other=0)
        else:
            from_k = k
        x = tl.load(x_ptr + from_k[None, :], mask=inside[None, :], other=0.0)
        if WEIGHED and IS_FIRST:
            x = (x.to(tl.float32) * token_weight[:, None]).to(x.dtype)
        sums = add_block(
            sums, x, start, k, inside, own_column, low_ptr, high_ptr, values_ptr, scales_ptr, offsets_ptr, zeros_ptr,
            super_scales_ptr, super_offsets_ptr, low_stride, high_stride, values_stride, num_groups, group_size,
            super_size, num_supers, zero, KIND, LOW_BITS, HIGH_BITS, SCALE_KIND, HAS_OFFSETS, HAS_ZEROS,
            HAS_SUPER_SCALES, HAS_SUPER_OFFSETS, IS_SPLIT, WIDEN,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + tl.load(part_offsets_ptr + 8) + own_column).to(tl.float32)[None, :]
    if WEIGHED and not IS_FIRST:
        sums = sums * token_weight[:, None]
    at = row if IS_FIRST else place
    out_ptr += at.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr, sums, mask=(row < end)[:, None] & (columns < num_columns)[None, :])

"""Quantised weights in the layout of csrc/cpu/quantized_panels.h: panels of 32 rows, codes and scales side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.block_codes import BlockCodes, join_codes, unpacked
from vllm.ops.code_planes import PLANES, split_planes
from vllm.ops.packed_linear import PANEL, pack_as
from vllm.ops.quantized_tensor import QuantizedTensor, SparseRows, are_equal, concatenate

# Bits of integers of 8 bits that panels have the other way: their codes are less 128.
_FLIPPED = 128
# Inputs of a group are filled up to whole units.
UNIT = 8
_TABLE = 16
# So many codes are packed at a time.
_TILE_CODES = 2**22

# As csrc/cpu/kernels.h numbers them.
_STORED = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.float8_e4m3fn: 6,
    torch.float8_e8m0fnu: 7,
}
_NIBBLES = (8, 9)
_WORDS = {2: torch.int16, 4: torch.int32}
_INTEGERS, _TABLE_OF_ALL, _TABLE_A_ROW, _E4M3, _E5M2 = range(5)
_FLOAT8 = {torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _E5M2}


@dataclass
class QuantizedPanels:
    """Rows of a quantised weight [N, K] in panels.

    Attributes:
        panels: uint8 [ceil(N / 32), bytes of a panel].
        description: int64 [11], Quantized in csrc/cpu/kernels.h.
        table: float32 [16], what small codes stand for, or None.
        order: int64 [K], QuantizedTensor.input_order.
        sparse: int32 starts and columns, float32 values; with `places`, int32 [nnz]: where packed rows of x have those
            columns.
    """

    panels: Tensor
    description: Tensor
    table: Tensor | None
    order: Tensor | None
    sparse: SparseRows | None
    places: Tensor | None
    shape: tuple[int, int]
    has_integers: bool  # all that is added are products with integer codes

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def arguments(self) -> tuple[Tensor | None, ...]:
        """The arguments of the operators."""
        sparse = self.sparse
        entries = (None, None) if sparse is None else (sparse.starts, sparse.columns)
        values = None if sparse is None else sparse.values
        return (self.panels, self.description, self.table, self.order, *entries, self.places, values)

    def take_rows(self, rows: Tensor) -> QuantizedPanels:
        """The rows W[rows], int64 [I], in panels of their own."""
        numbers = self.description.tolist()
        panels = _new_panels(len(rows), numbers)
        panel, half, lane = rows // PANEL, rows % PANEL // 16, rows % 16
        for source, target in zip(_views(self.panels, numbers), _views(panels, numbers), strict=True):
            _write(target, source[panel, :, half, lane])
        sparse, places = self.sparse, self.places
        if sparse is not None:
            numbered = replace(sparse, values=torch.arange(len(sparse.values))).take_rows(rows)
            sparse, places = sparse.take_rows(rows), self.places[numbered.values]  # type: ignore[index]
        return replace(self, panels=panels, sparse=sparse, places=places, shape=(len(rows), self.shape[1]))


@dataclass
class FloatPanels:
    """Rows of a weight [N, K] of 16-bit floats, in pack_linear's panels of the same values.

    Attributes:
        panels: float16 or bfloat16 [ceil(N / 32), K, 32].
    """

    panels: Tensor
    shape: tuple[int, int]
    has_integers: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def take_rows(self, rows: Tensor) -> FloatPanels:
        """As QuantizedPanels.take_rows."""
        return _float_panels(torch.ops.vllm_cpu.panel_rows(self.panels, rows, self.shape[0]))


Panels = QuantizedPanels | FloatPanels


def fits_panels(weight: QuantizedTensor) -> bool:
    """Whether the kernels have the weight's layout."""
    if weight.values is not None and weight.bits > 4:
        return False
    supers = {part.shape[1] for part in (weight.super_scales, weight.super_offsets) if part is not None}
    if len(supers) > 1 or 0 in weight.shape:
        return False
    if weight.codes.dtype == torch.float8_e4m3fn:
        return not bool((weight.plain_codes().view(torch.uint8) & 0x7F == 0x7F).any())
    return True


def _float_panels(weight: Tensor) -> FloatPanels:
    return FloatPanels(pack_as(weight, "packed_f32"), (weight.shape[0], weight.shape[1]))


def pack_panels(weights: Sequence[QuantizedTensor], rows: Tensor | None = None) -> Panels:
    """Weights, which fit and can be concatenated, below each other, or these `rows` of theirs (int64 [N], numbered
    through), in panels; no value changes."""
    if not _can_stay_apart(weights):
        whole = concatenate(weights) if len(weights) > 1 else weights[0]
        weights, rows = [whole if rows is None else whole.take_rows(rows)], None
    if weights[0].is_plain:
        return _float_panels(weights[0].plain_codes())
    return _quantized_panels(weights, rows)


def _can_stay_apart(weights: Sequence[QuantizedTensor]) -> bool:
    """Whether all that differs from row to row is codes in blocks, and numbers of groups."""
    first = weights[0]
    return all(
        isinstance(each.codes, BlockCodes)
        and not isinstance(each.zero_points, Tensor)
        and each.zero_points == first.zero_points
        and (each.values is None if first.values is None else are_equal(each.values, first.values))
        and (each.values is None or each.values.dim() == 1)
        and each.sparse is None
        for each in weights
    )


def _quantized_panels(weights: Sequence[QuantizedTensor], rows: Tensor | None) -> QuantizedPanels:
    """Packs the weights' `rows` (None: all)."""
    weight = weights[0]
    zero = 0 if isinstance(weight.zero_points, Tensor) else weight.zero_points
    kind = _FLOAT8.get(weight.codes.dtype, _INTEGERS)
    table = None
    if weight.values is not None:
        kind = _TABLE_OF_ALL if weight.values.dim() == 1 else _TABLE_A_ROW
    if kind == _INTEGERS and weight.bits <= 4:
        table = torch.tensor([float(code - zero) for code in range(2**weight.bits)] * (_TABLE // 2**weight.bits))
    elif kind == _TABLE_OF_ALL:
        assert weight.values is not None
        table = (weight.values.float() - zero).repeat(_TABLE // len(weight.values)).contiguous()
    if kind == _INTEGERS and weight.bits == 8:
        zero -= 128  # codes are kept less 128
    stored, kinds = _stored_parts(weights)
    supers = weight.super_scales if weight.super_scales is not None else weight.super_offsets
    num_supers = 0 if supers is None else supers.shape[1]
    numbers = [weight.bits, kind, weight.group_size, weight.num_groups, num_supers, zero, *kinds]
    if kind == _TABLE_A_ROW:
        assert weight.values is not None
        stored.append([weight.values.float()])
    places = torch.arange(sum(each.shape[0] for each in weights)) if rows is None else rows
    panels = _new_panels(len(places), numbers)
    _write_codes(weights, rows, kind, panels, numbers)
    at = _code_bytes(numbers)
    for (count, width), parts in zip(_counts(numbers), stored, strict=True):
        if len({part.stride(1) for part in parts}) > 1:
            parts = [part.contiguous() for part in parts]
        torch.ops.vllm_cpu.pack_numbers_(panels, parts, places, at)
        at += PANEL * count * width
    order = None if weight.input_order is None else weight.input_order.contiguous()
    sparse = _sparse(weight)
    has_integers = kind == _INTEGERS and weight.sparse is None
    shape = len(places), weight.shape[1]
    return QuantizedPanels(panels, torch.tensor(numbers), table, order, *sparse, shape, has_integers)


def _write_codes(
    weights: Sequence[QuantizedTensor], rows: Tensor | None, kind: int, panels: Tensor, numbers: list[int]
) -> None:
    weight, size = weights[0], weights[0].group_size
    codes = join_codes([each.codes for each in weights])
    if isinstance(codes, BlockCodes) and size % UNIT == 0 and weight.shape[1] % size == 0:
        flipped = codes.layout.flipped ^ (_FLIPPED if kind == _INTEGERS and weight.bits == 8 else 0)
        taken = codes.rows if rows is None else codes.rows[rows]
        arguments = list(codes.sources), taken, codes.layout.numbers, weight.bits, flipped
        torch.ops.vllm_cpu.pack_codes_(panels, *arguments)
        return
    plain = unpacked(codes) if rows is None else unpacked(codes)[rows]
    tile = max(1, _TILE_CODES // weight.shape[1] // PANEL) * PANEL
    for start in range(0, len(plain), tile):
        parts = _planes(plain[start : start + tile], weight, kind)
        views = _code_views(panels[start // PANEL : (start + tile) // PANEL], numbers)
        for view, part in zip(views, parts, strict=True):
            _write(view, part)


def _stored_parts(weights: Sequence[QuantizedTensor]) -> tuple[list[list[Tensor]], list[int]]:
    """The parts behind each weight's codes, and their five kinds (0: none)."""
    found = [_parts_of(weight) for weight in weights]
    kinds = found[0][1]
    if any(own != kinds for _, own in found):
        # Some weights' numbers are kept in another way than they are stored.
        found = [_parts_of(concatenate(weights))]
        kinds = found[0][1]
    return [list(parts) for parts in zip(*(parts for parts, _ in found), strict=True)], kinds


def _parts_of(weight: QuantizedTensor) -> tuple[list[Tensor], list[int]]:
    scales, offsets, zeros = _exact(weight.scales), _exact(weight.offsets), None
    if isinstance(weight.zero_points, Tensor):
        zeros = weight.zero_points
        fits = zeros.dtype == torch.uint8 or (zeros.numel() and zeros.min() >= 0 and zeros.max() < 256)
        zeros = zeros.to(torch.uint8) if fits else zeros.float()
    parts: list[Any] = [scales, offsets, zeros, _exact(weight.super_scales), _exact(weight.super_offsets)]
    kinds = [0 if part is None else _STORED[part.dtype] for part in parts]
    are_bytes = scales.dtype == torch.uint8 and offsets is not None and offsets.dtype == torch.uint8
    if are_bytes and bool(((scales | offsets) < 16).all()):
        parts[:2], kinds[:2] = [scales | (offsets << 4), None], _NIBBLES
    return [part for part in parts if part is not None], kinds


def _exact(part: Tensor | None) -> Any:
    """As stored; float32 where the kernels do not know the kind, or not all of its values."""
    if part is None:
        return None
    unknown: Any = part.dtype not in _STORED
    if part.dtype == torch.float8_e4m3fn:
        unknown = ((part.view(torch.uint8) & 0x7F) == 0x7F).any()
    elif part.dtype == torch.float8_e8m0fnu:
        # A float's exponents of zero and of infinity.
        unknown = ((part.view(torch.uint8) == 0) | (part.view(torch.uint8) == 255)).any()
    return part.float() if unknown else part


def _planes(codes: Tensor, weight: QuantizedTensor, kind: int) -> list[Tensor]:
    """uint8 [rows, A, B] of each of the codes' views, for some of the weight's rows."""
    codes, groups, size = codes.view(torch.uint8), weight.num_groups, weight.group_size
    if kind == _INTEGERS and weight.bits == 8:
        codes = codes ^ _FLIPPED
    if codes.shape[1] != groups * size or size % UNIT:
        codes = F.pad(codes, (0, groups * size - codes.shape[1]))
        codes = F.pad(codes.unflatten(1, (groups, size)), (0, -size % UNIT)).flatten(1)
    planes = split_planes(codes, weight.bits)
    if kind in (_E4M3, _E5M2):
        return [planes[0][:, :, None]]
    widths = PLANES[weight.bits]
    return [plane.unflatten(1, (-1, min(width, 4))) for plane, width in zip(planes, widths, strict=True)]


def _panel_bytes(numbers: list[int]) -> int:
    return -(-_used_bytes(numbers) // 64) * 64


def _used_bytes(numbers: list[int]) -> int:
    return _code_bytes(numbers) + sum(PANEL * count * width for count, width in _counts(numbers))


def _code_bytes(numbers: list[int]) -> int:
    bits, _, group_size, groups = numbers[:4]
    return -(-group_size // UNIT) * groups * PANEL * bits


def _counts(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Numbers a row and bytes a number, for each part behind the codes."""
    bits, kind, _, groups, supers, _, *kinds = numbers
    sizes = {number: dtype.itemsize for dtype, number in _STORED.items()} | {_NIBBLES[0]: 1}
    for place, stored in enumerate(kinds):
        if stored in sizes:
            yield groups if place < 3 else supers, sizes[stored]
    if kind == _TABLE_A_ROW:
        yield 2**bits, 4


def _views(panels: Tensor, numbers: list[int]) -> Iterator[Tensor]:
    """Each plane of codes, and each part behind them, as [panels, A, 2, 16, B], columns by halves."""
    yield from _code_views(panels, numbers)
    yield from _number_views(panels, numbers)


def _code_views(panels: Tensor, numbers: list[int]) -> Iterator[Tensor]:
    bits, kind = numbers[:2]
    units = panels[:, : _code_bytes(numbers)].unflatten(1, (-1, PANEL * bits))
    if kind in (_E4M3, _E5M2):
        yield units.unflatten(2, (UNIT, 16, 2)).flatten(1, 2).transpose(2, 3)[..., None]
    elif bits == 8:
        yield units.unflatten(2, (2, 2, 16, 4)).flatten(1, 2)
    else:
        start = 0
        for width in PLANES[bits]:
            plane = units[:, :, start : start + PANEL * width]
            yield plane.unflatten(2, (2, 16, 4) if width == 4 else (16, 2, width)).movedim(-2 if width < 4 else 2, 2)
            start += PANEL * width


def _number_views(panels: Tensor, numbers: list[int]) -> Iterator[Tensor]:
    at = _code_bytes(numbers)
    for count, width in _counts(numbers):
        stop = at + PANEL * count * width
        yield panels[:, at:stop].unflatten(1, (count, 2, 16, width))
        at = stop


def _write(view: Tensor, rows: Tensor) -> None:
    """[I, A, B] into a view of panels that hold them, zeros after the last."""
    missing = len(view) * PANEL - len(rows)
    whole = F.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows
    word = _WORDS.get(view.shape[-1])
    if word is not None:
        # Copied number by number, they may as well be larger ones.
        view, whole = view.view(word), whole.view(word)
    view.copy_(whole.unflatten(0, (-1, 2, 16)).permute(0, 3, 1, 2, 4))


def _new_panels(rows: int, numbers: list[int]) -> Tensor:
    """Zeros in what no part of a weight fills."""
    count, size = -(-rows // PANEL), _panel_bytes(numbers)
    panels = torch.ops.vllm_cpu.new_weight(count * size).view(count, size)
    panels[:, _used_bytes(numbers) :] = 0
    return panels


def _sparse(weight: QuantizedTensor) -> tuple[SparseRows | None, Tensor | None]:
    if weight.sparse is None:
        return None, None
    starts, columns, values = weight.sparse.starts.int(), weight.sparse.columns.int(), weight.sparse.values.float()
    places = torch.arange(weight.shape[1])
    units = -(-weight.group_size // UNIT) * UNIT
    places = places // weight.group_size * units + places % weight.group_size
    if weight.input_order is not None:
        places = torch.empty_like(places).index_copy_(0, weight.input_order, places)
    return SparseRows(starts, columns, values), places[columns.long()].int()

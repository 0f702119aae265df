"""A quantised weight by its format's definition, before it is packed for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm.ops.block_codes import BlockCodes, Codes, join_codes, unpacked

_NUMBERS = ("scales", "offsets", "super_scales", "super_offsets")
BITS = (2, 3, 4, 5, 6, 8, 16)
# Codes that are their own values, and their bits.
_FLOATS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 8, torch.float16: 16, torch.bfloat16: 16}


@dataclass
class SparseRows:
    """A matrix [N, K] of few values, in compressed rows.

    Attributes:
        starts: int32 or int64 [N + 1]: row n has entries starts[n] to starts[n + 1].
        columns: int32 or int64 [nnz] in [0, K).
        values: float [nnz].
    """

    starts: Tensor
    columns: Tensor
    values: Tensor

    def take_rows(self, rows: Tensor) -> SparseRows:
        counts = self.starts.diff()[rows]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        first = (self.starts[:-1][rows] - starts[:-1]).repeat_interleave(counts)
        entries = first + torch.arange(len(first), device=first.device)
        return SparseRows(starts.to(self.starts.dtype), self.columns[entries], self.values[entries])

    def take_columns(self, start: int, stop: int) -> SparseRows:
        kept = (self.columns >= start) & (self.columns < stop)
        starts = torch.nn.functional.pad(kept.cumsum(0), (1, 0))[self.starts.long()]
        return SparseRows(starts.to(self.starts.dtype), self.columns[kept] - start, self.values[kept])

    def row_numbers(self) -> Tensor:
        """int64 [nnz]: each entry's row."""
        counts = self.starts.diff().long()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


@dataclass
class QuantizedTensor:
    """A weight [N, K] as its format stores it, in float32, with g = k // group_size:

        W[n, k] = scale[n, g] * (value(codes[n, k]) - zero[n, g]) + offset[n, g] + sparse[n, k]

    The columns of codes may stand in another order than those of x: column k multiplies x[input_order[k]].

    Attributes:
        codes: uint8 [N, K], below 2^bits; or float8_e4m3fn, float8_e5m2, float16 or bfloat16 [N, K], which are their
            own values. BlockCodes: uint8 that is not unpacked yet.
        bits: 2, 3, 4, 5, 6 or 8; or 16 of floats, whose scales are 1 and which have nothing else.
        scales: [N, G], G = ceil(K / group_size): float32, float16, bfloat16, float8_e4m3fn or float8_e8m0fnu; or, with
            super_scales, also uint8 or int8.
        group_size: consecutive columns with one scale; K: one group a row. The last group may have fewer.
        zero_points: subtracted from the values: a number, or uint8 or int16 [N, G].
        offsets: as scales, [N, G]; None: 0.
        values: float [2^bits] or [N, 2^bits], what the codes stand for; None: their own numbers.
        super_scales: float [N, S]; S divides G. The scale of group g is scales[n, g] * super_scales[n, g // (G / S)].
        super_offsets: the same for the offsets.
        input_order: int64 [K], a permutation; None: that of x.
        sparse: added to the rest; its columns are in x's order.

    ValueError names the first field that does not fit.
    """

    codes: Codes
    bits: int
    scales: Tensor
    group_size: int
    zero_points: int | Tensor = 0
    offsets: Tensor | None = None
    values: Tensor | None = None
    super_scales: Tensor | None = None
    super_offsets: Tensor | None = None
    input_order: Tensor | None = None
    sparse: SparseRows | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {self.bits}")
        allowed = BITS[:-1] if self.codes.dtype == torch.uint8 else (_FLOATS.get(self.codes.dtype),)
        if self.bits not in allowed:
            kinds = "uint8 of at most 8 bits, float8 of 8 bits, or float16 or bfloat16"
            raise ValueError(f"codes must be {kinds}, got {self.codes.dtype} of {self.bits}")
        rows, inner = self.codes.shape
        if not 1 <= self.group_size <= max(inner, 1):
            raise ValueError(f"group_size must be in [1, {inner}] for {inner} columns, got {self.group_size}")
        groups = (rows, self.num_groups)
        for name in ("scales", "offsets", "zero_points"):
            part = getattr(self, name)
            if isinstance(part, Tensor) and part.shape != groups:
                raise ValueError(f"{name} must be {list(groups)} for codes of {[rows, inner]}, got {list(part.shape)}")
        self._check_details(rows, inner)

    def _check_details(self, rows: int, inner: int) -> None:
        table = 2**self.bits
        if self.values is not None and self.values.shape not in ((table,), (rows, table)):
            raise ValueError(f"values must be [{table}] or [{rows}, {table}], got {list(self.values.shape)}")
        for name in ("super_scales", "super_offsets"):
            part = getattr(self, name)
            if part is not None and (part.dim() != 2 or len(part) != rows or self.num_groups % max(part.shape[1], 1)):
                wanted = f"[{rows}, a divisor of {self.num_groups}]"
                raise ValueError(f"{name} must be {wanted}, got {list(part.shape)}")
        if self.super_offsets is not None and self.offsets is None:
            raise ValueError("super_offsets need offsets")
        if self.input_order is not None and self.input_order.shape != (inner,):
            raise ValueError(f"input_order must be [{inner}], got {list(self.input_order.shape)}")
        if self.sparse is not None and self.sparse.starts.shape != (rows + 1,):
            raise ValueError(f"sparse.starts must be [{rows + 1}], got {list(self.sparse.starts.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def num_groups(self) -> int:
        """G."""
        return -(-self.codes.shape[1] // self.group_size)

    @property
    def is_plain(self) -> bool:
        """Whether the codes are the weight, in 16-bit floats."""
        return self.bits == 16

    def is_finite(self) -> bool:
        """Whether all `float_parts` are."""
        return all(is_finite(part) for part in self.float_parts())

    def float_parts(self) -> list[Tensor]:
        """All floats that codes are multiplied with, added to or stand for."""
        parts = (self.scales, self.offsets, self.super_scales, self.super_offsets, self.values)
        return [part for part in parts if part is not None and part.is_floating_point()]

    def group_scales(self) -> Tensor:
        """float32 [N, G]: sub-scales times their super-scales."""
        return _times(self.scales, self.super_scales)

    def group_offsets(self) -> Tensor | None:
        """float32 [N, G], or None where there are none; the zero points are not among them."""
        return None if self.offsets is None else _times(self.offsets, self.super_offsets)

    def dequantize(self) -> Tensor:
        """float32 [N, K], columns in x's order."""
        if self.values is None:
            plain = self.plain_codes().float()
        elif self.values.dim() == 1:
            plain = self.values.float()[self.plain_codes().int()]
        else:
            plain = self.values.float().gather(1, self.plain_codes().long())
        if isinstance(self.zero_points, Tensor):
            plain -= self._of_columns(self.zero_points.float())
        elif self.zero_points:
            plain -= self.zero_points
        plain *= self._of_columns(self.group_scales())
        offsets = self.group_offsets()
        if offsets is not None:
            plain += self._of_columns(offsets)
        if self.input_order is not None:
            plain = torch.empty_like(plain).index_copy_(1, self.input_order, plain)
        if self.sparse is not None:
            places = (self.sparse.row_numbers(), self.sparse.columns.long())
            plain.index_put_(places, self.sparse.values.float(), accumulate=True)
        return plain

    def plain_codes(self) -> Tensor:
        """The codes as a tensor [N, K]."""
        return unpacked(self.codes)

    def take_rows(self, rows: Tensor | slice) -> QuantizedTensor:
        """W[rows]: int64 [I] in any order, or a slice without a step."""
        taken: dict[str, Any] = {name: part[rows] for name, part in self.parts_of_rows().items()}
        taken["codes"] = self.codes.take_rows(rows) if isinstance(self.codes, BlockCodes) else self.codes[rows]
        if self.sparse is not None:
            if isinstance(rows, slice):
                rows = torch.arange(*rows.indices(self.shape[0]), device=self.codes.device)
            taken["sparse"] = self.sparse.take_rows(rows)
        return replace(self, **taken)

    def take_columns(self, start: int, stop: int) -> QuantizedTensor:
        """W[:, start:stop], for x[start:stop]; where the range parts groups that share a super-scale, each has its own
        then. ValueError where the range cuts a group, or where input_order mixes groups from within the range and from
        without."""
        inner = self.shape[1]
        if self.input_order is None:
            first, last = start, stop
            order = None
        else:
            inside = (self.input_order >= start) & (self.input_order < stop)
            places = inside.nonzero().flatten()
            first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
            if last - first != stop - start:
                raise ValueError(
                    f"columns [{start}, {stop}) are not consecutive in input_order: act-order mixes groups"
                )
            order = self.input_order[first:last] - start
        groups = {"scales": self.group_size, "offsets": self.group_size, "zero_points": self.group_size}
        for name in ("super_scales", "super_offsets"):
            part = getattr(self, name)
            if part is not None and part.shape[1] > 1:
                size = self.num_groups // part.shape[1] * self.group_size
                if part.shape[1] < self.num_groups and (first % size or (last % size and last != inner)):
                    return self._with_own_supers().take_columns(start, stop)
                groups[name] = size
        for name, size in groups.items():
            if size < inner and (first % size or (last % size and last != inner)):
                raise ValueError(f"columns [{start}, {stop}) cut a group of {size} columns ({name})")
        taken = {
            name: getattr(self, name)[:, first // size : -(-last // size)]
            for name, size in groups.items()
            if isinstance(getattr(self, name), Tensor)
        }
        return replace(
            self,
            **taken,
            codes=(
                self.codes.take_columns(first, last)
                if isinstance(self.codes, BlockCodes)
                else self.codes[:, first:last]
            ),
            group_size=max(1, min(self.group_size, last - first)),
            input_order=order,
            sparse=None if self.sparse is None else self.sparse.take_columns(start, stop),
        )

    def _with_own_supers(self) -> QuantizedTensor:
        """With a super-scale, and a super-offset, for each group."""

        def spread(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.repeat_interleave(self.num_groups // part.shape[1], 1)

        return replace(self, super_scales=spread(self.super_scales), super_offsets=spread(self.super_offsets))

    def parts_of_rows(self) -> dict[str, Tensor]:
        """The fields behind the codes that have a row for each of W's."""
        names = ("scales", "zero_points", "offsets", "super_scales", "super_offsets", "values")
        parts = {name: getattr(self, name) for name in names}
        return {
            name: part
            for name, part in parts.items()
            if isinstance(part, Tensor) and not (name == "values" and part.dim() == 1)
        }

    def _of_columns(self, groups: Tensor) -> Tensor:
        """[N, K] of [N, G]; [N, 1] as it is."""
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


def plain_tensor(weight: Tensor) -> QuantizedTensor:
    """A float16 or bfloat16 [N, K] that is multiplied with as it is, whatever the dtype of x."""
    return QuantizedTensor(weight, 16, weight.new_ones(weight.shape[0], 1), max(weight.shape[1], 1))


def concatenate(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Rows of several weights, one after another. ValueError names what they do not have in common."""
    _must_be_alike(tensors)
    first = tensors[0]
    joined: dict[str, Any] = {"codes": join_codes([tensor.codes for tensor in tensors])}
    for name in _NUMBERS:
        if getattr(first, name) is not None:
            joined[name] = _cat([getattr(tensor, name) for tensor in tensors])
    if any(not are_equal(tensor.zero_points, first.zero_points) for tensor in tensors) or isinstance(
        first.zero_points, Tensor
    ):
        joined["zero_points"] = torch.cat([_zero_points_of_groups(tensor) for tensor in tensors])
    if any(not are_equal(tensor.values, first.values) for tensor in tensors) or (
        first.values is not None and first.values.dim() == 2
    ):
        joined["values"] = torch.cat([_values_of_rows(tensor) for tensor in tensors])
    return replace(first, **joined, sparse=_cat_sparse(tensors))


def can_concatenate(tensors: Sequence[QuantizedTensor]) -> bool:
    try:
        _must_be_alike(tensors)
    except ValueError:
        return False
    return True


def _must_be_alike(tensors: Sequence[QuantizedTensor]) -> None:
    for name in ("bits", "group_size"):
        _must_agree(name, [getattr(tensor, name) for tensor in tensors])
    _must_agree("codes' columns", [tensor.shape[1] for tensor in tensors])
    _must_agree("codes' dtype", [tensor.codes.dtype for tensor in tensors])
    if any(not are_equal(tensor.input_order, tensors[0].input_order) for tensor in tensors):
        raise ValueError("weights of one product must have one input_order")
    for name in _NUMBERS:
        parts = [getattr(tensor, name) for tensor in tensors]
        _must_agree(f"whether there are {name}", [part is None for part in parts])
        if parts[0] is not None:
            _must_agree(f"dtype of {name}", [part.dtype for part in parts])
            _must_agree(f"groups of {name}", [part.shape[1] for part in parts])


def _times(parts: Tensor, supers: Tensor | None) -> Tensor:
    """float32 [N, G] of [N, G] and [N, S]."""
    if supers is None:
        return parts.float()
    rows, count = parts.shape
    return (parts.float().view(rows, supers.shape[1], -1) * supers.float()[:, :, None]).view(rows, count)


def _must_agree(what: str, found: Sequence[object]) -> None:
    if any(each != found[0] for each in found):
        raise ValueError(f"weights of one product must agree: {what}: {', '.join(map(str, found))}")


def are_equal(a: object, b: object) -> bool:
    """Whether two numbers, tensors or Nones are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return type(a) is type(b) and a == b


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat, which has none for some kinds of float8."""
    if parts[0].dtype.is_floating_point and parts[0].itemsize == 1:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))


def _zero_points_of_groups(tensor: QuantizedTensor) -> Tensor:
    if isinstance(tensor.zero_points, Tensor):
        return tensor.zero_points
    groups = (tensor.shape[0], tensor.num_groups)
    return torch.full(groups, tensor.zero_points, dtype=torch.uint8, device=tensor.codes.device)


def _values_of_rows(tensor: QuantizedTensor) -> Tensor:
    own = torch.arange(2.0**tensor.bits, device=tensor.codes.device)
    values = own if tensor.values is None else tensor.values
    return values.expand(tensor.shape[0], -1)


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if values.dtype == torch.float8_e4m3fn and values.numel():
        # Its NaNs are the bytes 127 and 255.
        return int(values.view(torch.int8).max()) < 127 and int(values.view(torch.uint8).max()) < 255
    return not values.is_floating_point() or bool(values.float().isfinite().all())


def _cat_sparse(tensors: Sequence[QuantizedTensor]) -> SparseRows | None:
    if all(tensor.sparse is None for tensor in tensors):
        return None
    counts, columns, values = [], [], []
    for tensor in tensors:
        if tensor.sparse is None:
            counts.append(torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.codes.device))
            continue
        counts.append(tensor.sparse.starts.diff().long())
        columns.append(tensor.sparse.columns)
        values.append(tensor.sparse.values)
    starts = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
    return SparseRows(starts, torch.cat(columns), torch.cat(values))

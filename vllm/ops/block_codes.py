"""Codes of a quantised weight as blocks of bytes hold them, as GGUF's do, until they are unpacked or packed anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class BitField:
    """`width` bits of each of `count` codes, one after another, from the code `first` of a block on.

    Attributes:
        at: byte of the block that has the first ones.
        shift: their lowest bit in that byte.
        per_byte: consecutive codes in a byte, from low bits to high ones.
        to: their lowest bit in the code.

    first, count and at fit words of 8 codes: first and count are multiples of 8.
    """

    first: int
    count: int
    at: int
    width: int
    shift: int = 0
    per_byte: int = 1
    to: int = 0


@dataclass(frozen=True)
class BlockLayout:
    """A block: so many codes and bytes, and where the codes' bits are. Bits in `flipped` are stored the other way."""

    num_codes: int
    num_bytes: int
    fields: tuple[BitField, ...]
    flipped: int = 0

    @cached_property
    def numbers(self) -> Tensor:
        """The layout as int64, which pack_codes_ (csrc/cpu/bindings_packing.cpp) reads."""
        numbers = [self.num_codes, self.num_bytes]
        for each in self.fields:
            numbers += [each.first, each.count, each.at, each.width, each.shift, each.per_byte, each.to]
        return torch.tensor(numbers)


@dataclass(frozen=True)
class BlockCodes:
    """uint8 [N, K], each row a whole number of blocks.

    Attributes:
        sources: uint8 [n, bytes of a row] each, rows contiguous.
        rows: int64 [N]: which of the sources' rows, numbered through all of them.
        layout: of a block.
    """

    sources: tuple[Tensor, ...]
    rows: Tensor
    layout: BlockLayout

    @classmethod
    def of(cls, data: Tensor, layout: BlockLayout) -> BlockCodes:
        """The codes of blocks, uint8 [N, bytes of a row]."""
        return cls((data,), torch.arange(len(data)), layout)

    @cached_property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.num_blocks * self.layout.num_codes

    @property
    def num_blocks(self) -> int:
        """Number of blocks in a row."""
        return self.sources[0].shape[1] // self.layout.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def take_rows(self, rows: Tensor | slice) -> BlockCodes:
        return BlockCodes(self.sources, self.rows[rows], self.layout)

    def take_columns(self, start: int, stop: int) -> BlockCodes | Tensor:
        """Unpacked where the columns cut a block."""
        size = self.layout.num_codes
        if start % size or stop % size or start == stop:
            return self.unpack()[:, start:stop]
        places = slice(start // size * self.layout.num_bytes, stop // size * self.layout.num_bytes)
        return BlockCodes(tuple(source[:, places] for source in self.sources), self.rows, self.layout)

    def unpack(self) -> Tensor:
        """uint8 [N, K]."""
        data = self.sources[0] if len(self.sources) == 1 else torch.cat(self.sources)
        blocks = data[self.rows].unflatten(1, (-1, self.layout.num_bytes))
        codes = blocks.new_zeros(*blocks.shape[:2], self.layout.num_codes)
        for each in self.layout.fields:
            stored = blocks[:, :, each.at : each.at + each.count // each.per_byte, None]
            shifts = each.shift + torch.arange(each.per_byte, dtype=torch.uint8, device=blocks.device) * each.width
            bits = (stored >> shifts) & (2**each.width - 1)
            codes[:, :, each.first : each.first + each.count] |= bits.flatten(2) << each.to
        return (codes ^ self.layout.flipped if self.layout.flipped else codes).flatten(1)


Codes = Tensor | BlockCodes


def unpacked(codes: Codes) -> Tensor:
    """The codes as a tensor."""
    return codes.unpack() if isinstance(codes, BlockCodes) else codes


def join_codes(parts: Sequence[Codes]) -> Codes:
    """One below the other; unpacked where they are not all in the same blocks."""
    blocks = [part for part in parts if isinstance(part, BlockCodes)]
    first = blocks[0] if len(blocks) == len(parts) else None
    if first is None or any(each.layout != first.layout or each.shape[1] != first.shape[1] for each in blocks):
        return torch.cat([unpacked(part) for part in parts])
    rows: list[Tensor] = []
    sources: list[Tensor] = []
    count = 0
    for each in blocks:
        rows.append(each.rows + count)
        sources += each.sources
        count += sum(map(len, each.sources))
    return BlockCodes(tuple(sources), torch.cat(rows), first.layout)

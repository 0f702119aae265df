"""Copies of blocks between tensors that hold parts of them, such as the caches of layers: all in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function


class BlockParts(NamedTuple):
    """Tensors of the parts of blocks, and a table of their addresses; see `block_parts`."""

    parts: list[Tensor]  # part p of block b is parts[p][b], contiguous
    table: Tensor  # int64 [3, P], on their device: addresses, bytes from a block to the next, bytes of a part
    width: int  # 8, 4, 2 or 1: bytes, of which all of these are multiples
    longest: int  # bytes of the longest part


def block_parts(parts: Sequence[Tensor]) -> BlockParts:
    """Copies blocks of P tensors [blocks, size of the part], whose addresses it keeps."""
    rows = [(part.data_ptr(), part.stride(0) * part.element_size(), part[0].nbytes) for part in parts]
    width = next(width for width in (8, 4, 2, 1) if not any(value % width for row in rows for value in row))
    table = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(parts[0].device)
    return BlockParts(list(parts), table, width, max(size for *_, size in rows))


def copy_blocks_(source_ids: Tensor, target_ids: Tensor, source: BlockParts, target: BlockParts) -> None:
    """Copy the blocks source_ids of `source`, int64 [N], to target_ids of `target`, int64 [N] and distinct. Both have
    parts of the same sizes. No block may be both read and written."""
    if implementation(source_ids) == "triton":
        triton_function("copy_blocks_", __name__)(source_ids, target_ids, source, target)
        return
    width = min(source.width, target.width)
    for own, other in zip(source.parts, target.parts, strict=True):
        wide(other, width).index_copy_(0, target_ids, wide(own, width).index_select(0, source_ids))


def wide(part: Tensor, width: int) -> Tensor:
    """A part's blocks as integers of `width` bytes, see BlockParts: torch copies narrow elements one by one."""
    return part.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])

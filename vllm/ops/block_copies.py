"""Copies of blocks between tensors that hold parts of them, such as the caches of layers: all in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function
from vllm.utils.kv_store.segment import checksums


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
    which = implementation(source_ids)
    if which == "triton":
        triton_function("copy_blocks_", __name__)(source_ids, target_ids, source, target)
        return
    if which == "cpp":
        _copy(source_ids, target_ids, source, target, None)
        return
    width = min(source.width, target.width)
    for own, other in zip(source.parts, target.parts, strict=True):
        wide(other, width).index_copy_(0, target_ids, wide(own, width).index_select(0, source_ids))


def row_parts(rows: Tensor, of: BlockParts) -> BlockParts:
    """Rows, uint8 [N, size], as blocks with the parts of those `of`, one after the other."""
    return block_parts(rows.split(of.table[2].tolist(), dim=1))


def take_blocks_(rows: Tensor, ids: Tensor, source: BlockParts) -> Tensor:
    """Copy the blocks ids of `source`, int64 [N], on a CPU, to rows, uint8 [N, size], one part after the other.
    Returns `block_sums` of the rows."""
    target, numbers = row_parts(rows, source), torch.arange(len(ids))
    if implementation(rows) == "cpp":
        sums = torch.empty(len(ids), dtype=torch.int64)
        _copy(ids, numbers, source, target, sums)
        return sums
    copy_blocks_(ids, numbers, source, target)
    return block_sums(rows)


def block_sums(rows: Tensor) -> Tensor:
    """The checksums of a store's blocks, uint8 [N, size] on a CPU: int64 [N]. It runs in the calling thread alone."""
    if implementation(rows) == "cpp":
        sums: Tensor = torch.ops.vllm_cpu.block_sums(rows)
        return sums
    found = checksums(rows.numpy().reshape(-1), len(rows)) if len(rows) else []
    return torch.from_numpy(np.array(found, dtype=np.uint64).view(np.int64))


def _copy(source_ids: Tensor, target_ids: Tensor, source: BlockParts, target: BlockParts, sums: Tensor | None) -> None:
    counts = len(source.parts[0]), len(target.parts[0])
    torch.ops.vllm_cpu.copy_blocks_(source_ids, target_ids, source.table, target.table, *counts, sums)


def wide(part: Tensor, width: int) -> Tensor:
    """A part's blocks as integers of `width` bytes, see BlockParts: torch copies narrow elements one by one."""
    return part.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])

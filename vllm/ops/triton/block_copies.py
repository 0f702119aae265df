"""Triton implementation of `copy_blocks_`: a program copies a piece of one part of a block, by tables of addresses."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.block_copies import BlockParts

_WORDS = 1024
_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def copy_blocks_(source_ids: Tensor, target_ids: Tensor, source: BlockParts, target: BlockParts) -> None:
    if not len(source_ids):
        return
    width = min(source.width, target.width)
    grid = len(source_ids), len(source.parts), triton.cdiv(source.longest, _WORDS * width)
    arguments = source_ids, target_ids, source.table, target.table
    _copy_blocks_kernel[grid](*arguments, WORD=_TYPES[width], WIDTH=width, WORDS=_WORDS)


# Parts of uploads, at other offsets each time.
@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"])
def _copy_blocks_kernel(
    source_ids_ptr,  # int64 [N]
    target_ids_ptr,  # int64 [N]
    source_ptr,  # int64 [3, parts]: addresses, bytes from a block to the next, bytes of a part
    target_ptr,  # int64 [3, parts]
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
):
    copy, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = word < tl.load(source_ptr + 2 * parts + part) // WIDTH
    start = tl.load(source_ptr + part) + tl.load(source_ids_ptr + copy) * tl.load(source_ptr + parts + part)
    values = tl.load(start.to(tl.pointer_type(WORD)) + word, mask=mask)
    start = tl.load(target_ptr + part) + tl.load(target_ids_ptr + copy) * tl.load(target_ptr + parts + part)
    tl.store(start.to(tl.pointer_type(WORD)) + word, values, mask=mask)

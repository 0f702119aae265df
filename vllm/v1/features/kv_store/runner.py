"""Blocks of a store in the worker: copied out of the cache after a step has written them, and into it before one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.block_copies import BlockParts, block_parts, copy_blocks_
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.hidden_cache.runner import HiddenCache
from vllm.v1.features.kv_store.scheduler import CopiedBlocks, StepBlocks
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch

_TURN_BYTES = 64 * 2**20
"""Memory through which blocks pass on their way into the cache."""


class StoredBlocks(RunnerGuest):
    """A block's bytes are those of its keys and values in all layers, one after the other."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._copied: CopiedBlocks | None = None

    def reset(self, sizes: CacheSizes) -> None:
        self._copied = None

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        blocks = step.parts.of(StepBlocks)
        if blocks is None or not blocks.back:
            return
        for block, block_id in blocks.hidden_back:
            self._hidden.blocks(block.nbytes)[block_id] = torch.from_numpy(block)
        row_bytes = blocks.back[0][0].nbytes
        count = max(_TURN_BYTES // row_bytes, 1)
        for begin in range(0, len(blocks.back), count):
            turn = blocks.back[begin : begin + count]
            rows = torch.stack([torch.from_numpy(block) for block, _ in turn])
            staged, parts = self._staged(rows)
            copies = self._runner.block_copies
            copy_blocks_(torch.arange(len(staged)), copies.ids([each for _, each in turn]), parts, copies.parts)

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        blocks = step.parts.of(StepBlocks)
        if blocks is None or not (blocks.out or blocks.hidden_out):
            return
        copies = self._runner.block_copies
        rows = torch.empty((len(blocks.out), block_bytes(self._runner)), dtype=torch.uint8)
        if blocks.out:
            staged, parts = self._staged(rows)
            ids = copies.ids([each.block_id for each in blocks.out])
            copy_blocks_(ids, torch.arange(len(staged)), copies.parts, parts)
        # The guest that keeps them comes before this one: it has written this step's.
        states = [self._hidden.blocks()[each.block_id].numpy().copy() for each in blocks.hidden_out]
        self._copied = CopiedBlocks(rows.numpy(), states)

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        copied, self._copied = self._copied, None
        if copied is None:
            return None

        def complete(outcome: StepOutcome) -> None:
            outcome.output.parts.add(copied)

        return complete

    @property
    def _hidden(self) -> HiddenCache:
        hidden: HiddenCache | None = self._runner.guest(HiddenCache)
        assert hidden is not None
        return hidden

    def _staged(self, rows: Tensor) -> tuple[Tensor, BlockParts]:
        """Blocks, uint8 [N, size], as parts in the order of the cache's tensors."""
        caches = self._runner.block_copies.caches
        staged = rows.view(caches[0].dtype)
        return staged, block_parts(staged.split([cache.shape[1] for cache in caches], dim=1))


def block_bytes(runner: Any) -> int:
    """The size of a block."""
    return sum(cache.shape[1] * cache.element_size() for cache in runner.block_copies.caches)


def layout_of(worker: Any) -> list[Any]:
    """The parts of a worker's blocks: of each tensor the dtype and the shape."""
    runner = worker.model_runner
    found = {cache.data_ptr(): cache for group in runner.kv_caches for cache in group}
    return [[str(cache.dtype), list(cache.shape[1:])] for cache in found.values()]

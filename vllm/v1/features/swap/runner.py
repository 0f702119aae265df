"""Host blocks, and the copies of KV blocks to and from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.swap.scheduler import StepSwaps
from vllm.v1.worker.gpu.guests import CacheSizes, RunnerGuest
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import BlockCopies

logger = init_logger(__name__)

STAGING_BYTES = 64 * 2**20
"""Device memory through which blocks pass on CUDA: more blocks are copied in several turns."""

# Torch rounds pinned memory up to a power of two, so it is allocated in pieces just below one.
_PIECE_BYTES = 2**30


class SwapSpace(RunnerGuest):
    """Swaps blocks out before a step writes to any block, and in before its forward pass."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._swap: KVSwap | None = None

    def reset(self, sizes: CacheSizes) -> None:
        self._swap = KVSwap(self._runner.block_copies, sizes.num_host_blocks) if sizes.num_host_blocks else None

    def begin(self, step: SchedulerOutput) -> None:
        swaps = step.parts.of(StepSwaps)
        if swaps is not None and swaps.out and self._swap is not None:
            self._swap.swap_out(swaps.out)

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        swaps = step.parts.of(StepSwaps)
        if swaps is not None and swaps.back and self._swap is not None:
            self._swap.swap_in(swaps.back)


class KVSwap:
    """This rank's host blocks. One is one piece of memory, [E], where E is the size of a block's keys and values in all
    layers. On CUDA these are gathered on the device by one kernel, so that a block is one transfer. Transfers run on a
    stream of their own: the step's kernels do not wait for blocks that are swapped out. Copies come after earlier work
    on the current stream and before later work on it."""

    def __init__(self, blocks: BlockCopies, num_host_blocks: int) -> None:
        """Allocates the host blocks, pinned for CUDA. ValueError: there is no such memory."""
        self.blocks, self._parts = blocks, blocks.parts
        first = blocks.caches[0]
        self._device = first.device
        self._stream: torch.cuda.Stream | None = None
        self._pieces: list[Tensor] = []  # [blocks of the piece, E]
        sizes = [cache.shape[1] for cache in blocks.caches]
        size = sum(sizes)
        block_bytes = size * first.element_size()
        on_cuda = self._device.type == "cuda"
        self._blocks_a_piece = max(_PIECE_BYTES // block_bytes, 1)
        self._blocks_a_turn = min(max(STAGING_BYTES // block_bytes, 1), num_host_blocks)
        self._staging = torch.empty((self._blocks_a_turn, size), dtype=first.dtype, device=self._device)
        self._staged_parts = block_parts(self._staging.split(sizes, dim=1))
        self._staged_ids = torch.arange(self._blocks_a_turn, device=self._device)
        started = time.perf_counter()
        gib = num_host_blocks * block_bytes / 2**30
        try:
            for begin in range(0, num_host_blocks, self._blocks_a_piece):
                count = min(self._blocks_a_piece, num_host_blocks - begin)
                self._pieces.append(torch.empty((count, size), dtype=first.dtype, pin_memory=on_cuda))
        except RuntimeError as error:
            raise ValueError(f"swap_space: the host does not give {gib:.2f} GiB, lower it: {error}") from error
        if on_cuda:
            self._stream = torch.cuda.Stream(self._device)
            # An engine may end during a transfer.
            self._staging.record_stream(self._stream)
        seconds = time.perf_counter() - started
        logger.info("swap space: %d blocks, %.2f GiB of host memory, in %.1f s", num_host_blocks, gib, seconds)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block), each at most once."""
        for turn in self._turns(pairs):
            device_blocks = self.blocks.ids([device_block for device_block, _ in turn])
            staged = self._staging[: len(turn)]
            self._await_copies()
            copy_blocks_(device_blocks, self._staged_ids[: len(turn)], self._parts, self._staged_parts)
            with self._copying():
                for row, (_, host_block) in enumerate(turn):
                    self._host_block(host_block).copy_(staged[row], non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block), the latter distinct."""
        for turn in self._turns(pairs):
            device_blocks = self.blocks.ids([device_block for _, device_block in turn])
            staged = self._staging[: len(turn)]
            with self._copying():
                for row, (host_block, _) in enumerate(turn):
                    staged[row].copy_(self._host_block(host_block), non_blocking=True)
            self._await_copies()
            copy_blocks_(self._staged_ids[: len(turn)], device_blocks, self._staged_parts, self._parts)

    def _turns(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        for begin in range(0, len(pairs), self._blocks_a_turn):
            yield pairs[begin : begin + self._blocks_a_turn]

    def _host_block(self, block_id: int) -> Tensor:
        piece, row = divmod(block_id, self._blocks_a_piece)
        return self._pieces[piece][row]

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Queue copies on the copy stream, after all work queued on the step's stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _await_copies(self) -> None:
        """Make later work on the step's stream wait for all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

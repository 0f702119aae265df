"""CPU offload of KV blocks, swap-in, and copies between blocks of the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.states import KVCaches

logger = init_logger(__name__)

STAGING_BYTES = 64 * 2**20
"""Device memory through which blocks pass on CUDA: more blocks are copied in several turns."""

# Torch rounds pinned memory up to a power of two, so it is allocated in pieces just below one.
_PIECE_BYTES = 2**30


class KVSwap:
    """This rank's host blocks, the copies to and from them, and those from one block of the device to another. A host
    block is one piece of memory, [E], where E is the size of a block's keys and values in all layers. On CUDA these are
    gathered on the device by one kernel, so that a block is one transfer. Transfers run on a stream of their own: the
    step's kernels do not wait for blocks that are swapped out."""

    def __init__(self, kv_caches: KVCaches, num_host_blocks: int) -> None:
        """Allocates the host blocks (0: no step may swap), pinned for CUDA. ValueError: there is no such memory."""
        # 2 * layers of [B, size of a block's keys or values]; layers that share a cache have it once.
        own = {cache.data_ptr(): cache for pair in kv_caches for cache in pair}
        # Bytes, where elements are 8-bit floats, which torch does not copy by index everywhere, or of several kinds.
        are_bytes = len({c.dtype for c in own.values()}) > 1 or any(c.element_size() == 1 for c in own.values())
        self._caches = [(c.view(torch.uint8) if are_bytes else c).view(len(c), -1) for c in own.values()]
        self._pieces: list[Tensor] = []  # [blocks of the piece, E]
        if not self._caches:
            return
        first = self._caches[0]
        self._device = first.device
        self._stream: torch.cuda.Stream | None = None
        self._parts = block_parts(self._caches)
        if not num_host_blocks:
            return
        sizes = [cache.shape[1] for cache in self._caches]
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

    def run(self, step: SchedulerOutput) -> None:
        """Make the step's copies, ordered after earlier work on the current stream and before later work on it."""
        if not self._caches:
            return
        if step.swap_out:
            self._swap_out(step.swap_out)
        if step.block_copies:
            self._copy(step.block_copies)
        if step.swap_in:
            self._swap_in(step.swap_in)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        ids = self._ids(list(sources)), self._ids(list(targets))
        if set(sources).isdisjoint(targets):
            copy_blocks_(*ids, self._parts, self._parts)
            return
        for cache in self._caches:
            cache.index_copy_(0, ids[1], cache.index_select(0, ids[0]))

    def _swap_out(self, pairs: list[tuple[int, int]]) -> None:
        for turn in self._turns(pairs):
            device_blocks = self._ids([device_block for device_block, _ in turn])
            staged = self._staging[: len(turn)]
            self._await_copies()
            copy_blocks_(device_blocks, self._staged_ids[: len(turn)], self._parts, self._staged_parts)
            with self._copying():
                for row, (_, host_block) in enumerate(turn):
                    self._host_block(host_block).copy_(staged[row], non_blocking=True)

    def _swap_in(self, pairs: list[tuple[int, int]]) -> None:
        for turn in self._turns(pairs):
            device_blocks = self._ids([device_block for _, device_block in turn])
            staged = self._staging[: len(turn)]
            with self._copying():
                for row, (host_block, _) in enumerate(turn):
                    staged[row].copy_(self._host_block(host_block), non_blocking=True)
            self._await_copies()
            copy_blocks_(self._staged_ids[: len(turn)], device_blocks, self._staged_parts, self._parts)

    def _turns(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        for begin in range(0, len(pairs), self._blocks_a_turn):
            yield pairs[begin : begin + self._blocks_a_turn]

    def _ids(self, block_ids: list[int]) -> Tensor:
        return upload(np.array(block_ids, dtype=np.int64), self._device)

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

"""Decode steps on CUDA, captured for a ladder of batch sizes and replayed: one launch a step."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention.metadata import AttentionMetadata
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import upload_into
from vllm.v1.worker.gpu.cuda import GraphRecorder
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestStates

logger = init_logger(__name__)

# With more rows the kernels take longer than their launches.
_MAX_ROWS = 512


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending, up to `max_rows` or the largest that gains by it."""
    most = min(max_rows, _MAX_ROWS)
    return sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most, 16)) if size < most} | {most})


class DecodeStep:
    """A captured step of B = `size` requests, one token each.

    Attributes:
        hidden: [B, H], final hidden states.
        slots: int64 [B], by row; one past the last slot for padding rows.
    """

    def __init__(self, size: int, block_table: Tensor) -> None:
        """`block_table` is int32 [B, most blocks of a request]."""
        self.size = size
        # Positions, KV cache slots, the requests' slots, token ids, lengths; rows begin at multiples of 16 bytes.
        self.inputs = block_table.new_zeros((5, -(-size // 4) * 4))
        self.block_table = block_table
        self.query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=block_table.device)
        self.hidden: Tensor
        self.slots: Tensor
        self.replay: Callable[[], None]


class DecodeGraphs:
    """The model's forward pass for steps of requests that compute one token each, as RecordedDecode is on the CPU.

    A step is padded to the next size of the ladder. Padding rows are requests of one token in a KV block of their own,
    so kernels need no mask. The largest size is captured first, and the others reuse its memory.
    """

    def __init__(
        self,
        model: Any,
        kv_caches: list[tuple[Tensor, Tensor]],
        states: RequestStates,
        sizes: list[int],
        scratch_block: int,
        block_size: int,
        max_num_blocks: int,
        max_seq_len: int,
    ) -> None:
        """
        Args:
            kv_caches: of each layer; the graphs keep their addresses.
            sizes: of batches, ascending.
            scratch_block: a KV block that no request has.
            max_num_blocks: the most that a request can have.
            max_seq_len: longer contexts are not replayed.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._states = states
        self._sizes = sizes
        self._scratch_block = scratch_block
        self._max_seq_len = max_seq_len
        self._padding = np.array([0, scratch_block * block_size, states.max_num_reqs, 0, 1], dtype=np.int32)[:, None]
        shape = (sizes[-1], max_num_blocks)
        self._block_table = torch.full(shape, scratch_block, dtype=torch.int32, device=states.device)
        self._steps: dict[int, DecodeStep] = {}

    def record(self, recorder: GraphRecorder) -> None:
        """Capture every size."""
        start = time.monotonic()
        for size in reversed(self._sizes):
            step = DecodeStep(size, self._block_table[:size])
            upload_into(step.inputs, np.repeat(self._padding, step.inputs.shape[1], axis=1))
            (step.hidden, step.slots), step.replay = recorder.record(partial(self._run, step))
            self._steps[size] = step
        logger.info("Decode steps of %d sizes recorded in %.1f s", len(self._sizes), time.monotonic() - start)

    def _run(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        positions, slot_mapping, slots = step.inputs[:3].to(torch.int64)[:, : step.size]
        token_ids, seq_lens = step.inputs[3:, : step.size]
        if self._states.last_sampled is not None:
            token_ids = self._states.known(token_ids, slots)
        attn = AttentionMetadata(
            slot_mapping=slot_mapping,
            block_table=step.block_table,
            query_start_loc=step.query_start_loc,
            seq_lens=seq_lens,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        return self._model(token_ids, positions, self._kv_caches, attn), slots

    def takes(self, batch: InputBatch) -> bool:
        """Whether `batch` is such a step."""
        return batch.is_decode and len(batch.req_ids) <= self._sizes[-1] and batch.max_seq_len <= self._max_seq_len

    def step_for(self, batch: InputBatch) -> DecodeStep:
        """The step that `batch` is padded to."""
        return self._steps[self._sizes[bisect.bisect_left(self._sizes, len(batch.req_ids))]]

    def __call__(self, batch: InputBatch) -> Tensor:
        """Final hidden states, [T, H]; valid until the next step."""
        step, num_rows = self.step_for(batch), len(batch.req_ids)
        inputs = np.empty(step.inputs.shape, dtype=np.int32)
        inputs[:, num_rows:] = self._padding
        inputs[:2, :num_rows] = batch.positions_np, batch.slot_mapping_np
        inputs[2:, :num_rows] = batch.idx_mapping_np, batch.input_ids_np, batch.seq_lens_np
        upload_into(step.inputs, inputs)
        num_blocks = batch.block_table_np.shape[1]
        blocks = np.full((step.size, num_blocks), self._scratch_block, dtype=np.int32)
        blocks[:num_rows] = batch.block_table_np
        upload_into(step.block_table[:, :num_blocks], blocks)
        step.replay()
        return step.hidden[:num_rows]

"""Decode steps on the CPU, recorded at the first of each batch size and replayed after: one operator a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.logger import init_logger
from vllm.ops.recording import RecordedMemory, Recording
from vllm.utils.host_memory import return_freed_memory
from vllm.v1.worker.gpu.input_batch import InputBatch, ModelInputs
from vllm.v1.worker.gpu.states import BlockTables, KVCaches, RequestStates

logger = init_logger(__name__)

MAX_ROWS = 256
"""Requests of a recorded step: with more, the kernels' time leaves little to save."""

# A recording of 30 layers takes half a MiB.
_MAX_RECORDINGS = 64


class _Inputs:
    """The inputs of up to R requests, one token each, at fixed addresses."""

    def __init__(self, num_rows: int, max_num_blocks: int, num_groups: int = 1) -> None:
        self.input_ids = torch.empty(num_rows, dtype=torch.int32)
        self.positions = torch.empty(num_rows, dtype=torch.int64)
        self.attn = AttentionMetadata(
            slot_mapping=torch.empty(num_rows, dtype=torch.int64),
            block_table=torch.zeros((num_rows, max_num_blocks), dtype=torch.int32),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.empty(num_rows, dtype=torch.int32),
            max_query_len=1,
            max_seq_len=0,
        )
        self.attn.groups = tuple(
            replace(
                self.attn,
                slot_mapping=torch.empty_like(self.attn.slot_mapping),
                block_table=torch.zeros_like(self.attn.block_table),
            )
            for _ in range(1, num_groups)
        )

    def take(self, inputs: ModelInputs) -> ModelInputs:
        """A batch's inputs, copied here: the rows that it fills."""
        num_rows = len(inputs.input_ids)
        own = self._take_group(inputs.attn, self.attn)
        if self.attn.groups:
            pairs = zip(inputs.attn.groups, self.attn.groups, strict=True)
            own.groups = tuple(self._take_group(source, kept) for source, kept in pairs)
        input_ids = self.input_ids[:num_rows].copy_(inputs.input_ids)
        return ModelInputs(input_ids, self.positions[:num_rows].copy_(inputs.positions), own, inputs.hidden_rows)

    @staticmethod
    def _take_group(source: AttentionMetadata, attn: AttentionMetadata) -> AttentionMetadata:
        num_rows = len(source.seq_lens)
        own = replace(
            source,
            slot_mapping=attn.slot_mapping[:num_rows].copy_(source.slot_mapping),
            block_table=attn.block_table[:num_rows],
            query_start_loc=attn.query_start_loc[: num_rows + 1],
            seq_lens=attn.seq_lens[:num_rows].copy_(source.seq_lens),
        )
        own.block_table[:, : source.block_table.shape[1]].copy_(source.block_table)
        return own


class RecordedDecode:
    """The model's forward pass for steps of up to MAX_ROWS requests that compute one token each. A replay runs the same
    kernels on the same numbers, so results are equal bit for bit. It bypasses Python: hooks on modules are not called
    (use `enforce_eager` for them). A model with an operation that cannot be recorded is not recorded at all,
    and the log says so."""

    def __init__(
        self,
        model: Any,
        kv_caches: KVCaches,
        states: RequestStates,
        block_tables: BlockTables,
        max_num_reqs: int,
        num_groups: int = 1,
    ) -> None:
        """Recordings keep the addresses of `kv_caches`; `max_num_reqs` is the most requests that a step can have."""
        self._model = model
        self._kv_caches = kv_caches
        self._states = states
        self._max_rows = min(max_num_reqs, MAX_ROWS)
        self._inputs = _Inputs(self._max_rows, block_tables.table.shape[1], num_groups)
        self._memory = RecordedMemory()
        self._recorded: dict[int, tuple[Recording, Tensor]] = {}  # by number of requests, least recently used first
        self._records = True

    def takes(self, batch: InputBatch) -> bool:
        """Whether `batch` can be replayed from a recording."""
        return self._records and batch.is_decode and len(batch.req_ids) <= self._max_rows

    def __call__(self, batch: InputBatch) -> Tensor:
        """Final hidden states, [T, H]; valid until the next step."""
        inputs = self._inputs.take(batch.to_device(self._states))
        recorded = self._recorded.pop(len(batch.req_ids), None)
        if recorded is None:
            recording = Recording(self._memory)
            with recording:
                hidden = self._model(inputs.input_ids, inputs.positions, self._kv_caches, inputs.attn)
            if recording.missed:
                missed = ", ".join(sorted(recording.missed))
                logger.info("Decode steps are not recorded but run by Python, because of %s", missed)
                self._records = False
                return hidden
            # Recorded calls are allocated between kernels' buffers, which leave holes of hundreds of KiB when freed.
            return_freed_memory()
        else:
            recording, hidden = recorded
            recording.replay()
        self._recorded[len(batch.req_ids)] = recording, hidden
        if len(self._recorded) > _MAX_RECORDINGS:
            del self._recorded[next(iter(self._recorded))]
        return hidden

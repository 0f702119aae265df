"""Decode steps of few requests, recorded at the first of each size and replayed after: one operator a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm.logger import init_logger
from vllm.ops.recording import Recording
from vllm.v1.attention.metadata import AttentionMetadata
from vllm.v1.worker.gpu.input_batch import InputBatch, ModelInputs
from vllm.v1.worker.gpu.states import RequestStates

logger = init_logger(__name__)

# With more rows the kernels' time leaves little to save, and a recording's tensors, which are not shared between
# layers, take more room.
MAX_ROWS = 8


class _Step:
    """The inputs of R requests, one token each, at fixed places, and what becomes of them."""

    def __init__(self, inputs: ModelInputs, max_num_blocks: int) -> None:
        attn = inputs.attn
        num_reqs = attn.block_table.shape[0]
        self.input_ids = inputs.input_ids.clone()
        self.positions = inputs.positions.clone()
        self.attn = AttentionMetadata(
            slot_mapping=attn.slot_mapping.clone(),
            block_table=attn.block_table.new_zeros((num_reqs, max_num_blocks)),
            query_start_loc=attn.query_start_loc.clone(),
            seq_lens=attn.seq_lens.clone(),
            max_query_len=1,
            max_seq_len=attn.max_seq_len,
        )
        self.hidden: Tensor
        self.recording = Recording()

    def fill(self, inputs: ModelInputs) -> None:
        """Take a batch's inputs."""
        attn = inputs.attn
        self.input_ids.copy_(inputs.input_ids)
        self.positions.copy_(inputs.positions)
        self.attn.slot_mapping.copy_(attn.slot_mapping)
        self.attn.block_table[:, : attn.block_table.shape[1]].copy_(attn.block_table)
        self.attn.seq_lens.copy_(attn.seq_lens)


class RecordedDecode:
    """The model's forward pass for steps of up to MAX_ROWS requests that compute one token each.

    A replay runs the very kernels on the same numbers, so results do not change by a bit. It does not come by
    Python, however: hooks on modules are not called (`enforce_eager` is for their users). A model with an operation
    that cannot be recorded is not recorded at all.
    """

    def __init__(self, model: Any, kv_caches: list[tuple[Tensor, Tensor]], max_num_blocks: int) -> None:
        """
        Args:
            kv_caches: of each layer; the recordings keep their addresses.
            max_num_blocks: the most blocks that a request can have.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._max_num_blocks = max_num_blocks
        self._steps: dict[int, _Step] = {}
        self._records = True

    def takes(self, batch: InputBatch) -> bool:
        """Whether `batch` is such a step."""
        return self._records and batch.is_decode and len(batch.req_ids) <= MAX_ROWS

    def __call__(self, batch: InputBatch, states: RequestStates) -> Tensor:
        """Final hidden states, [T, H]; valid until the next step."""
        inputs = batch.to_device(states)
        step = self._steps.get(len(batch.req_ids))
        if step is not None:
            step.fill(inputs)
            step.recording.replay()
            return step.hidden
        step = _Step(inputs, self._max_num_blocks)
        step.fill(inputs)
        with step.recording:
            step.hidden = self._model(step.input_ids, step.positions, self._kv_caches, step.attn)
        if step.recording.missed:
            logger.debug("Decode is not recorded because of %s", ", ".join(sorted(step.recording.missed)))
            self._records = False
        else:
            self._steps[len(batch.req_ids)] = step
        return step.hidden

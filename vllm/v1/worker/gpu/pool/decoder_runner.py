"""Runs a decoder whose requests are pooled: the steps of a generating model, and a pooler in place of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.layers.pooler import Pooler
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.input_batch import InputBatch, PromptBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.pool.step import PooledStep
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptRows


class PoolingModelRunner(GPUModelRunner):
    """Requests that pool all of their tokens read their prompts, as those do that read prompt logprobs: what the prefix
    cache has of them includes final hidden states."""

    records_steps = False

    def __init__(self, config: VllmConfig, model: Any, device: torch.device, *make_guests: Any) -> None:
        super().__init__(config, model, device, *make_guests)
        self._pooler = Pooler(config.model_config, device, getattr(model, "classify", None))
        # By slot: the parameters, and final hidden states of the tokens before the last one, in their order.
        self._params: dict[int, PoolingParams] = {}
        self._parts: dict[int, list[Tensor]] = {}

    def _update_states(self, step: SchedulerOutput) -> None:
        super()._update_states(step)
        for new in step.scheduled_new_reqs:
            slot = self.states.req_id_to_slot[new.req_id]
            self._params[slot] = new.pooling_params or PoolingParams(task=self.model_config.pooling_tasks[0])  # type: ignore[arg-type]
            self._parts[slot] = []

    def _finish_step(self, batch: InputBatch, hidden: Tensor) -> PooledStep:
        if batch.prompts is not None:
            self._collect(batch.prompts, hidden)
        pooled = {}
        rows = range(len(hidden)) if batch.logits_rows_np is None else batch.logits_rows_np.tolist()
        for row, index in zip(rows, batch.sampling_rows_np.tolist(), strict=False):
            slot, last = int(batch.idx_mapping_np[index]), hidden[row : row + 1]
            parts = self._parts.pop(slot)
            states = torch.cat([*parts, last]) if parts else last
            ids = self.states.token_ids[slot, : int(batch.seq_lens_np[index])]
            for before_request in self._before_request:
                before_request(slot)
            pooled[batch.req_ids[index]] = self._pooler(states, ids, self._params[slot])
        return PooledStep(pooled, self._completions(batch, hidden))

    def _collect(self, prompts: PromptBatch, hidden: Tensor) -> None:
        for source, rows in prompts.parts(hidden):
            for slot, places in _by_slot(rows):
                self._parts[slot].append(source.index_select(0, upload(places, self.device)))


def _by_slot(rows: PromptRows) -> Iterator[tuple[int, np.ndarray]]:
    """Each slot with the sources of its rows."""
    borders = np.flatnonzero(rows.slots[1:] != rows.slots[:-1]) + 1
    for part in np.split(np.arange(len(rows.slots)), borders) if len(rows.slots) else ():
        yield int(rows.slots[part[0]]), rows.sources[part]

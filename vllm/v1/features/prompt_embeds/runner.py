"""Embeddings of prompts in the worker: given to the forward pass of each step that computes their positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.inputs.embeds import PromptEmbeds
from vllm.layers.input_rows import InputRows
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.prompt_embeds.scheduler import StepEmbeds
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.guests import RunnerGuest
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import NO_ID


class EmbeddedRows(RunnerGuest):
    """The rows that the slots' requests have embeddings for."""

    def __init__(self, runner: Any) -> None:
        """ValueError: the model does more with a token's id than look up its embedding."""
        self._states = runner.states
        self._embeds: dict[int, PromptEmbeds] = {}
        rows: InputRows | None = getattr(runner.model, "input_rows", None)
        if rows is None:
            raise ValueError(
                f"enable_prompt_embeds=True cannot be used: {type(runner.model).__name__} takes more of a token than "
                "its embedding; leave it out and pass prompt_token_ids"
            )
        self._rows = rows

    def remove(self, slot: int) -> None:
        self._embeds.pop(slot, None)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        embeds = (step.parts.of(StepEmbeds) or StepEmbeds()).get(new.req_id)
        if embeds is not None:
            self._embeds[slot] = embeds
            self._states.token_ids[slot, embeds.positions] = NO_ID

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        self._rows.clear()
        tokens, values = self._given(batch) if self._embeds else ([], [])
        if not tokens:
            return
        numbers = np.concatenate(tokens)
        batch.input_ids_np[numbers] = 0  # any that can be looked up
        batch.is_changed, batch.can_record_change = True, False
        device = self._states.device
        self._rows.give(upload(numbers, device), torch.cat(values).to(device))

    def _given(self, batch: InputBatch) -> tuple[list[np.ndarray], list[Tensor]]:
        """The step's tokens that have embeddings, int64 [N], and these, [N, W], in parts."""
        tokens: list[np.ndarray] = []
        values: list[Tensor] = []
        starts, ends, origins = batch.num_computed_np, batch.seq_lens_np, batch.origins_np
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            embeds = self._embeds.get(slot)
            if embeds is None:
                continue
            first, last = np.searchsorted(embeds.positions, (starts[row], ends[row])).tolist()
            if first < last:
                tokens.append(embeds.positions[first:last] + origins[row])
                values.append(embeds.rows[first:last])
        return tokens, values

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        self._rows.clear()

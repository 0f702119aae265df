"""Says which adapters the rows of a step go through."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm.config.lora import LoRAConfig
from vllm.models.transformers.encoder import TransformersEncoder
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.adapters.manager import AdapterManager
from vllm.v1.features.adapters.scheduler import StepAdapters
from vllm.v1.worker.gpu.guests import RunnerGuest
from vllm.v1.worker.gpu.input_batch import InputBatch


class Adapters(RunnerGuest):
    """
    Attributes:
        manager: the adapters of the worker.
    """

    def __init__(
        self,
        model: Any,
        config: LoRAConfig,
        max_num_reqs: int,
        max_tokens: int,
        records: bool,
        reads_images: bool = False,
    ) -> None:
        """`max_tokens`: the most rows of a step that may be recorded; `records`: whether any is, by its kernels."""
        self.manager = manager = AdapterManager(model, config, max_num_reqs, max_tokens, reads_images)
        self._max_tokens, self._records = max_tokens, records
        if isinstance(model, TransformersEncoder):
            model.use_adapter, model.adapter_of = manager.use_one, lambda place: int(manager.row_of_slot[place])

    def version(self) -> int:
        return self.manager.version

    def remove(self, slot: int) -> None:
        self.manager.remove_request(slot)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        adapters = step.parts.of(StepAdapters)
        self.manager.add_request(slot, None if adapters is None else adapters.get(new.req_id))

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        slots = batch.idx_mapping_np
        if self._records and batch.is_decode and len(slots) <= self._max_tokens:
            batch.is_changed = self.manager.use_recorded(slots)
        else:
            hidden_slots = batch.token_slots_np[batch.hidden_rows_np]
            logits_slots = hidden_slots if batch.logits_rows_np is None else hidden_slots[batch.logits_rows_np]
            batch.is_changed = self.manager.use(batch.token_slots_np, hidden_slots, logits_slots)
        batch.can_record_change = batch.is_changed and batch.is_decode and self.manager.can_record(slots)

    def changes_head(self) -> bool:
        return self.manager.changes_head

    def before_rows(self, slots: np.ndarray) -> None:
        self.manager.use(slots)

    def before_request(self, slot: int) -> None:
        self.manager.use_one(slot)

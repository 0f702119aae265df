"""Looks at prompts of which a step computes no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.broken_prompts.scheduler import BrokenPrompts
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.guests import Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch


class _LastStates(NamedTuple):
    is_finite: Tensor  # bool [N]

    def moved(self, move: Callable[[Tensor], Tensor]) -> _LastStates:
        return _LastStates(move(self.is_finite))


class PromptChecks(RunnerGuest):
    """Tests the final hidden state of the last token that a step computes of a request without logits: every layer
    has read the keys and values before it there. A single token fills no block that the next step does not read."""

    def __init__(self, runner: Any) -> None:
        self._copies, self._device = runner.host_copies, runner.device
        self._checked: tuple[list[str], np.ndarray] | None = None  # N requests, and the step's tokens, int64 [N]

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        self._checked = None
        if batch.max_query_len == 1:
            return
        is_checked = batch.num_scheduled_np > 1
        is_checked[batch.sampling_rows_np] = False
        rows = np.flatnonzero(is_checked)
        if len(rows):
            tokens = batch.query_start_loc_np[1:][rows].astype(np.int64) - 1
            batch.need_hidden(tokens)
            self._checked = [batch.req_ids[row] for row in rows.tolist()], tokens

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        if self._checked is None:
            return None
        req_ids, tokens = self._checked
        rows = upload(np.searchsorted(batch.hidden_rows_np, tokens), self._device)
        found = _LastStates(hidden.index_select(0, rows).isfinite().all(dim=1))
        take = (lambda: found) if self._copies is None else self._copies.start(found)

        def complete(outcome: StepOutcome) -> None:
            is_finite = take().is_finite.tolist()
            if not all(is_finite):
                broken = [req_id for req_id, finite in zip(req_ids, is_finite, strict=True) if not finite]
                outcome.output.parts.add(BrokenPrompts(frozenset(broken)))

        return complete

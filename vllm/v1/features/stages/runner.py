"""Takes the tokens that the last stage has sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.drafts.scheduler import StepDrafts
from vllm.v1.features.stages.scheduler import StepTokens
from vllm.v1.features.states.runner import States
from vllm.v1.worker.gpu.guests import RunnerGuest


class TokensOfSteps(RunnerGuest):
    """Writes a step's generated tokens and drafts into the slots of their requests, on stages that do not sample. Where
    a step begins before the end of the last one, that had drafts which were wrong.

    Args:
        runner: whose slots these are.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._states = runner, runner.states

    def before_batch(self, step: SchedulerOutput) -> None:
        part = step.parts.of(StepTokens)
        if part is None:
            return
        self._take_back(step)
        states, drafts = self._states, step.parts.of(StepDrafts) or StepDrafts()
        for request_id, token_ids in part.token_ids.items():
            slot, tentative = states.req_id_to_slot[request_id], drafts.get(request_id, [])
            end = int(states.num_computed_tokens[slot]) + step.num_scheduled_tokens[request_id] - len(tentative)
            states.token_ids[slot, end - len(token_ids) : end] = token_ids
            states.total_len[slot] = max(int(states.total_len[slot]), end)
            if tentative:
                states.place_tentative(slot, tentative)

    def _take_back(self, step: SchedulerOutput) -> None:
        cached, states = step.scheduled_cached_reqs, self._states
        slots = np.array([states.req_id_to_slot[each] for each in cached.req_ids], dtype=np.int64)
        computed = np.array(cached.num_computed_tokens, dtype=np.int32)
        wrong = computed < states.num_computed_tokens[slots]
        states.num_computed_tokens[slots] = computed
        guest = self._runner.guest(States)
        if guest is not None:
            guest.take_back(slots[wrong])

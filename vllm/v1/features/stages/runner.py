"""Takes the tokens that the last stage has sampled."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.stages.scheduler import StepTokens
from vllm.v1.worker.gpu.guests import RunnerGuest


class TokensOfSteps(RunnerGuest):
    """Writes a step's generated tokens into the slots of their requests, on stages that do not sample.

    Args:
        runner: whose slots these are.
    """

    def __init__(self, runner: Any) -> None:
        self._states = runner.states

    def before_batch(self, step: SchedulerOutput) -> None:
        part = step.parts.of(StepTokens)
        if part is None:
            return
        states = self._states
        for request_id, token_ids in part.token_ids.items():
            slot = states.req_id_to_slot[request_id]
            end = int(states.num_computed_tokens[slot]) + step.num_scheduled_tokens[request_id]
            states.token_ids[slot, end - len(token_ids) : end] = token_ids
            states.total_len[slot] = max(int(states.total_len[slot]), end)

"""Forced tokens in the scheduler: appended after a draw, and returned at once or, where they are read, with their
readings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs.lists import LogprobsRows
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


@dataclass
class StepRuns:
    """A step's forced tokens, by request id."""

    appended: dict[str, list[int]] = field(default_factory=dict)  # follow the sampled token without a choice
    readings: dict[str, list[LogprobsRows]] = field(default_factory=dict)  # of those of earlier steps, in order

    def without(self, req_ids: Collection[str]) -> StepRuns:
        """The same without readings of these requests."""
        kept = {req_id: rows for req_id, rows in self.readings.items() if req_id not in req_ids}
        return StepRuns(self.appended, kept)


class ForcedTokens(SchedulerGuest):
    """Appends them."""

    def __init__(self, scheduler: Any) -> None:
        self._requests, self._kv = scheduler.requests, scheduler.kv
        # By request id, how many of its last tokens are not returned yet, as they are still to be read.
        self._held: dict[str, int] = {}

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        if num_held := self._held.pop(request.request_id, 0):
            # They will be found again.
            request.drop_last(num_held, self._kv.block_size)

    def ended(self, request: Request) -> None:
        self._held.pop(request.request_id, None)

    def begin_update(self, output: ModelRunnerOutput) -> dict[str, EngineCoreOutput]:
        runs = output.parts.of(StepRuns)
        if runs is None or not runs.readings:
            return {}
        return {
            request_id: self._returned(self._requests[request_id], rows)
            for request_id, rows in runs.readings.items()
            if request_id in self._requests
        }

    def _returned(self, request: Request, parts: list[LogprobsRows]) -> EngineCoreOutput:
        """The held tokens that the step has read."""
        output = EngineCoreOutput(request.request_id, [])
        rows = [(part.lists, index) for part in parts for index in range(part.rows.start, part.rows.stop)]
        num_held = self._held.pop(request.request_id, 0)
        start = len(request.token_ids) - num_held
        output.new_token_ids += request.token_ids[start : start + len(rows)]
        if num_held > len(rows):
            self._held[request.request_id] = num_held - len(rows)
        if request.reads_logprobs:
            output.logprobs = list(rows)
        if request.sampling_params.grammar_readings:
            # All that was allowed is the token itself.
            output.allowed_mass = [lists.first_logprob(index) for lists, index in rows]
        return output

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        runs = output.parts.of(StepRuns)
        if runs is None or not runs.appended:
            return
        for each in outputs:
            run, request = runs.appended.get(each.request_id), self._requests.get(each.request_id)
            if run is None or request is None or each.finish_reason is not None:
                continue
            request.token_ids += run
            if request.sampling_params.reads_generated:
                self._held[each.request_id] = len(run)
            else:
                each.new_token_ids += run

"""How steps follow each other: one by one, or each begun while the one before it runs."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.guests import hooks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.request import Request, RequestStatus


class Steps:
    """Each step is scheduled once the results of the last one are known.

    Attributes:
        weight_version: of the weights of the last step.
        readings_seconds: spent on reading logits for logprobs since the start.
    """

    def __init__(self, scheduler: Any, executor: Any) -> None:
        self.scheduler, self._executor = scheduler, executor
        self.weight_version: int | str = 0
        self.readings_seconds = 0.0
        self._weights_version = executor.worker.weights_version
        self._num_updates = 0

    @property
    def are_done(self) -> bool:
        """Whether the results of all steps are known."""
        return True

    def schedule(self) -> SchedulerOutput:
        """The step whose results come next. RuntimeError: none of the requests can ever be scheduled; they end."""
        self.check_weights()
        return self._schedule()

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The step's results. Raises the worker's error, after ending the step's requests; EngineDeadError: a rank of
        several failed."""
        try:
            output: ModelRunnerOutput = self._executor.execute_model(step)
        except BaseException:
            self.scheduler.discard_step(step)
            raise
        self.readings_seconds += output.readings_seconds
        return output

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The outputs for the step's requests."""
        outputs: list[EngineCoreOutput] = self.scheduler.update_from_output(step, output)
        return outputs

    def settle(self) -> list[EngineCoreOutput]:
        """Wait for the results of all steps that have begun."""
        return []

    def _schedule(self) -> SchedulerOutput:
        """Schedule a step while none is in flight: RuntimeError if it is empty, since the next ones would be, too."""
        step: SchedulerOutput = self.scheduler.schedule()
        # Blocks that a preempted request gave up, or that a guest still keeps, are for a later step.
        is_stuck = not (step.num_scheduled_tokens or step.preempted_req_ids or self.scheduler.is_transferring)
        if is_stuck and self.scheduler.has_unfinished_requests():
            stuck = list(self.scheduler.requests)
            self.scheduler.discard_step(step)
            self.scheduler.abort_requests(stuck)
            raise RuntimeError(f"none of {len(stuck)} unfinished requests can ever be scheduled; they were aborted")
        return step

    @property
    def _weights_changed(self) -> bool:
        return bool(self._executor.worker.weights_version != self._weights_version)

    def check_weights(self) -> None:
        """After a change of weights nothing is kept of what others computed: running requests begin anew."""
        worker = self._executor.worker
        if self._weights_changed:
            for changed in hooks(self.scheduler.guests, "weights_changed"):
                changed()
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            # Where that fails, the next step tries it again.
            self._weights_version = worker.weights_version
            self._num_updates += 1
        named = worker.weight_version
        self.weight_version = self._num_updates if named is None else named


@dataclass
class StepInFlight:
    """A step without results yet. Meanwhile its requests may end, and their ids may be reused."""

    scheduled: SchedulerOutput
    pending: PendingStep
    requests: dict[str, Request]
    drawing: list[Request]  # those that draw a token in the step
    num_ended: int  # scheduler.num_ended when the step began

    def stale_ids(self, scheduler: Scheduler) -> set[str]:
        """Ids of the step's requests that have ended since."""
        if self.num_ended == scheduler.num_ended:
            return set()
        return {name for name, request in self.requests.items() if scheduler.requests.get(name) is not request}

    def is_over(self, scheduler: Scheduler) -> bool:
        return len(self.stale_ids(scheduler)) == len(self.requests)


def can_schedule_ahead(scheduler: Scheduler) -> bool:
    """Whether a step can be scheduled while another one is in flight: no request needs unknown tokens on the host, or
    would be preempted, for which all its tokens must be known."""
    if any(request.num_pending_tokens and request.needs_known_tokens for request in scheduler.running):
        return False
    kv, budget = scheduler.kv, scheduler.config.max_num_batched_tokens
    num_free = kv.pool.num_free
    # A quick bound: each request begins at most one block more than its share of the budget fills.
    if num_free >= (budget // kv.block_size + len(scheduler.running)) * kv.num_groups:
        return True
    for request in scheduler.running:
        num_new = min(max(request.num_tokens_to_compute - request.num_computed_tokens, 0), budget)
        budget -= num_new
        num_free -= max(kv.num_missing_blocks(request, num_new), 0)
    return num_free >= 0


def dispatch(
    scheduler: Scheduler, scheduled: SchedulerOutput, pending: PendingStep, counts_pending: bool = True
) -> StepInFlight:
    """The scheduled step has begun: mark the tokens that it draws as pending, unless the next ones wait for them."""
    requests = {request_id: scheduler.requests[request_id] for request_id in scheduled.num_scheduled_tokens}
    drawing = [
        request
        for request in requests.values()
        if counts_pending
        and request.num_computed_tokens == len(request.token_ids) + request.num_pending_tokens
        and request.max_tokens
    ]
    for request in drawing:
        request.num_pending_tokens += 1
    return StepInFlight(scheduled, pending, requests, drawing, scheduler.num_ended)


def complete(scheduler: Scheduler, step: StepInFlight, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
    """Process the step's results."""
    for request in step.drawing:
        request.num_pending_tokens -= 1
    stale = step.stale_ids(scheduler)
    outputs = scheduler.update_from_output(step.scheduled, output.without(stale) if stale else output)
    block_size = scheduler.kv.block_size
    for request in step.drawing:
        if not len(request.token_ids) % block_size and request.status is RequestStatus.RUNNING:
            scheduler.kv.register_known(request)
    return outputs


def discard(scheduler: Scheduler, step: StepInFlight) -> None:
    """The step failed: end its requests."""
    stale = step.stale_ids(scheduler)
    scheduler.discard_step(step.scheduled, stale)
    if stale:
        # Their blocks are free already, and may lack what the step was to write.
        scheduler.kv.pool.forget_evictable()


class StepsAhead(Steps):
    """A step begins, where that is possible, before the results of the one before it are taken."""

    _counts_pending = True  # a request's next step may begin before its last token is known

    def __init__(self, scheduler: Any, executor: Any) -> None:
        super().__init__(scheduler, executor)
        self._in_flight: deque[StepInFlight] = deque()  # the next results are the first one's

    @property
    def are_done(self) -> bool:
        return not self._in_flight

    def schedule(self) -> SchedulerOutput:
        if not self._in_flight:
            self.check_weights()
            self._begin(self._schedule())
        elif self._in_flight[0].is_over(self.scheduler):
            # All its requests have ended since.
            self._begin(self._schedule())
            self._end_first()
        return self._in_flight[0].scheduled

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        # If this raises, the next call takes the results of the step in flight.
        worker = self._executor.worker
        if not self._weights_changed and worker.can_schedule_ahead and can_schedule_ahead(self.scheduler):
            self._begin(self.scheduler.schedule())
        return self._take()

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        return complete(self.scheduler, self._in_flight.popleft(), output)

    def settle(self) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        while self._in_flight:
            outputs += self._end_first()
        return outputs

    def _end_first(self) -> list[EngineCoreOutput]:
        """Take the results of the first step in flight. Where all its requests have ended there are no outputs, but
        guests may be waiting for what their side in the worker says."""
        return self.update(self._in_flight[0].scheduled, self._take())

    def _begin(self, step: SchedulerOutput) -> None:
        try:
            pending = self._executor.begin_step(step)
        except BaseException:
            self.scheduler.discard_step(step)
            raise
        self._in_flight.append(dispatch(self.scheduler, step, pending, self._counts_pending))

    def _take(self) -> ModelRunnerOutput:
        """The results of the first step in flight; on an error all are discarded: others read what it was to
        write."""
        try:
            output = self._in_flight[0].pending.result()
        except BaseException:
            said: list[ModelRunnerOutput] = []
            discard(self.scheduler, self._in_flight.popleft())
            while self._in_flight:
                later = self._in_flight.popleft()
                discard(self.scheduler, later)
                # The device must have finished with it; the first error is the one to raise.
                with contextlib.suppress(Exception):
                    said.append(later.pending.result())
            for output in said:
                for heard in hooks(self.scheduler.guests, "heard"):
                    heard(output)
            raise
        self.readings_seconds += output.readings_seconds
        return output


class StepsInStages(StepsAhead):
    """As many steps have begun as the model has stages; a request is in one of them, or its prompt is in several."""

    _counts_pending = False

    def schedule(self) -> SchedulerOutput:
        while self._in_flight and self._in_flight[0].is_over(self.scheduler):
            # All its requests have ended since.
            self._end_first()
        if not self._in_flight:
            self.check_weights()
            self._begin(self._schedule())
        return self._in_flight[0].scheduled

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        scheduler = self.scheduler
        while (
            len(self._in_flight) < scheduler.config.num_steps_in_flight
            and not self._weights_changed
            and can_schedule_ahead(scheduler)
        ):
            further = scheduler.schedule()
            if not (further.num_scheduled_tokens or further.parts):
                # All requests wait for tokens that steps in flight draw.
                scheduler.discard_step(further)
                break
            self._begin(further)
        return self._take()

"""Steps that begin while the one before them runs, before its tokens are known: these are pending, and the next step
computes them. If such a token ended its request, the next step's result for the request is discarded."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.request import Request, RequestStatus


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

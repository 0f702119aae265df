"""The scheduler of models whose tokens see those after them: a request has no cache, and is complete after a step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from vllm.config import SchedulerConfig
from vllm.v1.core.guests import SchedulerGuest, hooks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput, SchedulerStats
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class WholeRequestScheduler:
    """Methods as Scheduler's. A step takes the next requests, at most max_num_seqs with max_num_batched_tokens
    together, and at least one."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        make_guests: Callable[[WholeRequestScheduler], Sequence[SchedulerGuest]] = lambda scheduler: (),
    ) -> None:
        self.config = scheduler_config
        self.refused: list[EngineCoreOutput] = []  # ends of requests that cannot be admitted; taken by the core
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(scheduler_config.policy == "priority")
        self._arrivals = itertools.count()
        self.guests = guests = tuple(make_guests(self))
        self._on_queued, self._on_ready = hooks(guests, "queued"), hooks(guests, "ready")
        self._on_next, self._on_admitted = hooks(guests, "next"), hooks(guests, "admitted")
        self._on_ended, self._on_fill = hooks(guests, "ended"), hooks(guests, "fill")

    def add_request(self, request: Request) -> None:
        """Queue a request. ValueError: its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        for queued in self._on_queued:
            queued(request)
        request.arrival_index = next(self._arrivals)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        for request_id in list(request_ids):
            request = self.requests.pop(request_id, None)
            if request is not None:
                if request.status is RequestStatus.WAITING:
                    self.waiting.remove(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        for ended in self._on_ended:
            ended(request)

    def queue_prepared(self) -> bool:
        """See Scheduler."""
        return True

    is_transferring = False

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    def stats(self) -> SchedulerStats:
        """There is no cache to count."""
        num_running = len(self.requests) - len(self.waiting)
        counts = {name: value for guest in self.guests for name, value in guest.counts().items()}
        return SchedulerStats(num_running, len(self.waiting), 0.0, 0, 0, 0, **counts)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step, in the order of lengths: neighbours of equal length are attended together."""
        budget, now = self.config.max_num_batched_tokens, time.monotonic()
        batch: list[Request] = []
        while len(self.waiting) and len(batch) < self.config.max_num_seqs:
            request = self._on_next[0](self.waiting) if self._on_next else self.waiting.peek()
            if request is None:
                break
            budget -= request.num_tokens
            if batch and budget < 0:
                break
            self.waiting.remove(request)
            if self._make_ready(request):
                for admitted in self._on_admitted:
                    admitted(request)
                request.status, request.scheduled_time = RequestStatus.RUNNING, now
                batch.append(request)
        batch.sort(key=lambda request: request.num_tokens)
        new = [
            NewRequestData(
                request.request_id,
                request.token_ids,
                request.num_tokens,
                request.sampling_params,
                block_ids=(),
                num_computed_tokens=0,
                pooling_params=request.pooling_params,
            )
            for request in batch
        ]
        counts = {request.request_id: request.num_tokens for request in batch}
        step = SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values()), [], [])
        for fill in self._on_fill:
            fill(step)
        return step

    def _make_ready(self, request: Request) -> bool:
        """Whether a request that is to be admitted can be; otherwise it ends."""
        for ready in self._on_ready:
            if (error := ready(request)) is not None:
                del self.requests[request.request_id]
                self._end(request)
                self.refused.append(EngineCoreOutput(request.request_id, [], finish_reason="error", error=error))
                return False
        return True

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """End the step's requests with their results."""
        outputs = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.pop(request_id, None)
            if request is None:
                continue  # aborted while the step ran
            self._end(request)
            output = EngineCoreOutput(request_id, [], finish_reason="stop", scheduled_time=request.scheduled_time)
            if error := model_runner_output.errors.get(request_id):
                output.finish_reason, output.error = "error", error
            else:
                output.pooling_output = model_runner_output.pooled[request_id]
            outputs.append(output)
        return outputs

    def discard_step(self, scheduler_output: SchedulerOutput, stale: Collection[str] = ()) -> list[str]:
        """The step failed: end its requests. Returns their ids."""
        lost = [request_id for request_id in scheduler_output.num_scheduled_tokens if request_id in self.requests]
        self.abort_requests(lost)
        return lost

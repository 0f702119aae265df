"""Which requests with adapters may run together, and the loads that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import NOT_ENABLED, LoRARequest
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.features.adapters.pool import Adapter, AdapterPool
from vllm.v1.request import Request, RequestStatus


def pool_of(guests: Sequence[Any]) -> AdapterPool:
    """The pool of a scheduler's guests.

    Raises:
        VLLMValidationError: adapters are not enabled.
    """
    for guest in guests:
        if isinstance(guest, AdapterTurns):
            return guest.pool
    raise VLLMValidationError(NOT_ENABLED, "lora_request")


class StepAdapters(dict[str, LoRARequest]):
    """By id, the adapters of the requests that get slots in a step, as the workers hold them: lora_int_id is
    AdapterPool's number."""


class AdapterTurns(SchedulerGuest):
    """A request's adapter is its lane in the queue, so that others can pass those that wait for a turn."""

    def __init__(self, pool: AdapterPool, requests: Mapping[str, Request]) -> None:
        """`requests`: the scheduler's."""
        self.pool, self._requests = pool, requests

    def queued(self, request: Request) -> None:
        if request.lora_request is not None:
            adapter = self.pool.bind(request.lora_request)
            # What an adapter computes is found only by requests of the same load.
            request.lane, request.content_number = adapter, adapter.number or -1

    def next(self, waiting: RequestQueue) -> Request | None:
        lanes = self.pool.open
        if lanes is None:
            return waiting.peek()
        request = waiting.peek_among(lanes)
        if request is not None and request.lane is not None and waiting.peek() is not request:
            self.pool.num_passed += 1
        return request

    def ready(self, request: Request) -> str | None:
        """Load the adapter of a request, if it has been evicted."""
        adapter: Adapter | None = request.lane
        if adapter is None:
            return None
        error = self.pool.make_ready(adapter)
        if error is None and request.content_number != adapter.number:
            # What was hashed of it is of another load.
            request.content_number = adapter.number
            request.block_hashes.clear()
        return error

    def admitted(self, request: Request) -> None:
        if request.lane is not None:
            self.pool.begin(request.lane)

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        if request.lane is not None:
            self.pool.end(request.lane)

    def ended(self, request: Request) -> None:
        if request.lane is not None:
            if request.status is RequestStatus.RUNNING:
                self.pool.end(request.lane)
            self.pool.release(request.lane)

    def fill(self, step: SchedulerOutput) -> None:
        adapters = StepAdapters()
        for new in step.scheduled_new_reqs:
            if (adapter := self._requests[new.req_id].lane) is not None:
                adapters[new.req_id] = adapter.worker_request
        if adapters:
            step.parts.add(adapters)

    def counts(self) -> dict[str, Any]:
        return {
            "running_adapters": tuple(self.pool.running_names),
            "waiting_adapters": tuple(self.pool.waiting_names),
        }

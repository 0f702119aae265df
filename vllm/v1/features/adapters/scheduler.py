"""Which requests with adapters may run together, and the loads that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.features.adapters.pool import Adapter, AdapterPool
from vllm.v1.request import Request, RequestStatus


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
            # Blocks that an adapter computes are found only by requests of the same load.
            request.lane, request.content_number = adapter, adapter.number or -1
            request.content_name = adapter.content if adapter.number else ""

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
            # The blocks that were hashed of it are of another load.
            request.content_number, request.content_name = adapter.number, adapter.content
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

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        pool = self.pool
        return {
            "add_lora": pool.add,
            "try_add_lora": self._try_add,
            "remove_lora": pool.remove,
            "list_loras": pool.loaded_ids,
            "pin_lora": pool.pin,
        }

    def _try_add(self, fields: Mapping[str, Any]) -> str:
        """Load an adapter for another process: a LoRARequest's fields in, what is wrong with it out; "" = nothing."""
        try:
            self.pool.add(LoRARequest(**fields))
        except ValueError as error:
            return str(error.args[0])
        return ""

    def counts(self) -> dict[str, Any]:
        return {
            "running_adapters": tuple(self.pool.running_names),
            "waiting_adapters": tuple(self.pool.waiting_names),
        }

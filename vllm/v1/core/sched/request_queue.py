"""Waiting requests, in the order in which they are admitted."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from vllm.v1.request import Request


class RequestQueue(Protocol):
    """What the scheduler needs of a queue."""

    def add(self, request: Request) -> None:
        """Put a newly arrived request where it belongs."""

    def put_back(self, request: Request) -> None:
        """Put back a request that was preempted: before those that have not run."""

    def peek(self) -> Request:
        """The request whose turn it is."""

    def pop(self) -> Request:
        """Take it out."""

    def remove(self, request: Request) -> None:
        """Take out any request."""

    def __len__(self) -> int: ...


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """At the end."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """At the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The first."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Take out the first."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take out any."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest priority value first, ties by arrival; a preempted request takes its old place again."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []
        self._members: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """By its sort key."""
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.sort_key(), request))

    put_back = add

    def peek(self) -> Request:
        """The one with the lowest key."""
        # Removed requests stay in the heap until they surface.
        while self._members.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take it out."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out any."""
        del self._members[request.request_id]

    def __len__(self) -> int:
        return len(self._members)


def make_queue(policy: str) -> RequestQueue:
    """The queue of a scheduling policy, "fcfs" or "priority"."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()

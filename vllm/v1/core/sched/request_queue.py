"""Waiting requests, in the order in which they are admitted."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

from vllm.v1.request import Request


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Add a newly arrived request."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Add a preempted request: before those that have not run."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The next request."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Remove and return the next request."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Remove any request."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest priority value first, ties by arrival; a preempted request gets its old place. Methods as FCFSQueue's."""

    def __init__(self) -> None:
        # By number, not by id: an entry of a removed request stays in the heap while its id may come back.
        self._heap: list[tuple[tuple[int, float, int], int]] = []
        self._members: dict[int, Request] = {}
        self._number_of: dict[str, int] = {}
        self._numbers = itertools.count()

    def add(self, request: Request) -> None:
        number = next(self._numbers)
        self._members[number] = request
        self._number_of[request.request_id] = number
        heapq.heappush(self._heap, (request.sort_key(), number))

    put_back = add

    def peek(self) -> Request:
        # Removed requests stay in the heap until they are its first entry, or outnumber the others.
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0][1]]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._members[self._number_of.pop(request.request_id)]
        # In amortised constant time: the removals since the last time pay for it.
        if len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

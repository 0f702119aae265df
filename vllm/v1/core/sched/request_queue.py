"""Waiting requests, in the order in which they are admitted."""

from __future__ import annotations

import heapq

from vllm.v1.request import Request


class RequestQueue:
    """Requests by arrival, or, with `by_priority`, by Request.sort_key. A preempted one gets its old place again."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, float, int]] = []  # keys, which end with the request's arrival_index
        self._members: dict[int, Request] = {}  # by arrival_index

    def add(self, request: Request) -> None:
        """Add a request that has arrived or was preempted."""
        self._members[request.arrival_index] = request
        heapq.heappush(self._heap, request.sort_key() if self._by_priority else (0, 0.0, request.arrival_index))

    def peek(self) -> Request:
        """The next request."""
        # Removed requests stay in the heap until they are its first entry, or outnumber the others.
        while self._heap[0][-1] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0][-1]]

    def pop(self) -> Request:
        """Remove and return the next request."""
        request = self.peek()
        heapq.heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove any request."""
        del self._members[request.arrival_index]
        # In amortised constant time: the removals since the last time pay for it.
        if len(self._heap) > 2 * len(self._members):
            self._heap = [key for key in self._heap if key[-1] in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

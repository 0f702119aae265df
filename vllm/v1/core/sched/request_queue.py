"""Waiting requests, in the order in which they are admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request


class RequestQueue:
    """Requests by arrival, or, with `by_priority`, by Request.sort_key. A preempted one gets its old place again.

    A request may have a lane, whose requests others can pass.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._lanes: dict[Any, _Lane] = {}
        self.num_tokens = 0  # of all of them

    def add(self, request: Request) -> None:
        """Add a request that has arrived or was preempted."""
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = _Lane()
        key = request.sort_key() if self._by_priority else (0, 0.0, request.arrival_index)
        lane.add(request, key)
        self.num_tokens += request.num_tokens

    def peek(self) -> Request:
        """The next request."""
        request = self.peek_among(None)
        assert request is not None, "none waits"
        return request

    def peek_among(self, lanes: Iterable[Any] | None) -> Request | None:
        """The next request of these lanes, or, if None, of all."""
        own = self._lanes
        if len(own) == 1 and lanes is None:
            return next(iter(own.values())).first()[1]
        heads = [own[each].first() for each in (own if lanes is None else lanes) if each in own]
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def pop(self) -> Request:
        """Remove and return the next request."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove any request."""
        lane = self._lanes[request.lane]
        lane.remove(request)
        self.num_tokens -= request.num_tokens
        if not lane.members:
            del self._lanes[request.lane]

    def __len__(self) -> int:
        return sum(len(lane.members) for lane in self._lanes.values())


_Key = tuple[int, float, int]  # ends with the request's arrival_index


class _Lane:
    """Waiting requests that pass each other only by their order."""

    def __init__(self) -> None:
        self.heap: list[_Key] = []
        self.members: dict[int, Request] = {}  # by arrival_index

    def add(self, request: Request, key: _Key) -> None:
        self.members[request.arrival_index] = request
        heapq.heappush(self.heap, key)

    def first(self) -> tuple[_Key, Request]:
        # Removed requests stay in the heap until they are its first entry, or outnumber the others.
        while self.heap[0][-1] not in self.members:
            heapq.heappop(self.heap)
        return self.heap[0], self.members[self.heap[0][-1]]

    def remove(self, request: Request) -> None:
        del self.members[request.arrival_index]
        # In amortised constant time: the removals since the last time pay for it.
        if len(self.heap) > 2 * len(self.members):
            self.heap = [key for key in self.heap if key[-1] in self.members]
            heapq.heapify(self.heap)

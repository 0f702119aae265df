"""The queues by themselves: their order, and what they hold."""

from __future__ import annotations

import random

import pytest
from core_harness import make_request, make_scheduler

from vllm.v1.core.sched.request_queue import RequestQueue


def test_requests_that_left_are_not_kept():
    """One that stays at the head, while many come and leave behind it."""
    queue = RequestQueue(by_priority=True)
    first = make_request("r0", [1])
    queue.add(first)
    for number in range(1, 1001):
        leaving = make_request(f"r{number}", [1], priority=1)
        leaving.arrival_index = number
        queue.add(leaving)
        queue.remove(leaving)
    assert len(queue) == 1 and queue.peek() is first
    assert len(queue._lanes[None].heap) <= 2


@pytest.mark.parametrize("by_priority", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_a_sorted_list(seed, by_priority):
    """Whatever has been removed, put back or taken in between."""
    draw = random.Random(seed)
    queue, expected = RequestQueue(by_priority), []
    for number in range(2000):
        # In turns it grows and is emptied.
        if draw.random() < (0.7 if number // 200 % 2 == 0 else 0.3) or not expected:
            request = make_request(f"r{number}", [1], priority=draw.randrange(5))
            request.arrival_index = number
            queue.add(request)
            expected.append(request)
            expected.sort(key=lambda each: each.sort_key() if by_priority else each.arrival_index)
        elif draw.random() < 0.3:
            taken = queue.pop()
            assert taken is expected.pop(0)
            if draw.random() < 0.2:  # preempted
                queue.add(taken)
                expected.insert(0, taken)
        else:
            queue.remove(expected.pop(draw.randrange(len(expected))))
        assert len(queue) == len(expected)
        assert sum(len(lane.heap) for lane in queue._lanes.values()) <= 2 * len(expected)
        if expected:
            assert queue.peek() is expected[0]
    while expected:
        assert queue.pop() is expected.pop(0)


def test_requests_aborted_while_they_wait_are_not_kept():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for number in range(300):
        scheduler.add_request(make_request(f"r{number}", [1] * 3, priority=300 - number))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r299"]
    scheduler.abort_requests([f"r{number}" for number in range(1, 299)])
    assert len(scheduler.waiting) == 1 and len(scheduler.waiting._lanes[None].heap) <= 2
    scheduler.abort_requests(["r299"])
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r0"]

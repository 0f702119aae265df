"""Prefixes that end inside a block: what is found, and when what is copied is there."""

from __future__ import annotations

from collections import Counter

import pytest
from core_harness import FakeRunner, expected_output, make_request, make_scheduler, run_step

from vllm.v1.core.block_pool import PartialBlockIndex

PREFIX = [1, 2, 3, 4, 5, 6]
"""A block of 4, and half of the next."""


def drain(scheduler, runner) -> list:
    outputs = []
    while scheduler.has_unfinished_requests():
        outputs += run_step(scheduler, runner)
    return outputs


def test_a_prefix_ends_where_the_tokens_part():
    scheduler, runner = make_scheduler(), FakeRunner(4)
    scheduler.add_request(make_request("r0", [*PREFIX, 0, 0, 0], max_tokens=1))
    drain(scheduler, runner)
    for name, tail, cached in (("r1", [6, 6], 6), ("r2", [0, 5], 7), ("r3", [0], 6), ("r4", [0, 0], 7)):
        prompt = [*PREFIX, *tail]
        scheduler.add_request(make_request(name, prompt, max_tokens=5))
        outputs = drain(scheduler, runner)
        assert outputs[-1].num_cached_tokens == cached
        said = [token for output in outputs for token in output.new_token_ids]
        assert said == expected_output(prompt, 5, 48)
    assert scheduler.kv.stats.num_prefix_hit_tokens == 6 + 7 + 6 + 7


def test_the_first_block_too_but_not_across_salts():
    scheduler, runner = make_scheduler(), FakeRunner(4)
    for name, salt, cached in (("r0", None, 0), ("r1", None, 3), ("r2", "salt", 0), ("r3", "salt", 3)):
        runner.salts[name] = salt
        scheduler.add_request(make_request(name, [1, 2, 3, int(name[1])], max_tokens=1, salt=salt))
        assert drain(scheduler, runner)[-1].num_cached_tokens == cached


def test_what_the_same_step_computes_is_written_twice_and_nothing_copied():
    scheduler, runner = make_scheduler(budget=40), FakeRunner(4)
    for number in range(3):
        scheduler.add_request(make_request(f"r{number}", [*PREFIX, number, number], max_tokens=1))
    step = scheduler.schedule()
    assert step.block_copies == []
    assert step.shared_tokens == [("r0", "r1", 4, 2), ("r0", "r2", 4, 2)]
    assert step.num_scheduled_tokens == {"r0": 8, "r1": 2, "r2": 2}
    outputs = scheduler.update_from_output(step, runner.execute(step))
    assert [output.num_cached_tokens for output in outputs] == [0, 6, 6]
    scheduler.add_request(make_request("r3", [*PREFIX, 3], max_tokens=1))
    step = scheduler.schedule()
    assert len(step.block_copies) == 1 and step.shared_tokens == [] and step.num_scheduled_tokens == {"r3": 1}


def test_a_block_that_another_step_began_is_not_shared_but_copied_later():
    scheduler, runner = make_scheduler(budget=6), FakeRunner(4)
    scheduler.add_request(make_request("r0", [*PREFIX, 0, 0, 0, 0], max_tokens=1))
    run_step(scheduler, runner)  # r0's second block has two tokens now
    scheduler.add_request(make_request("r1", [*PREFIX, 0, 1], max_tokens=1))
    step = scheduler.schedule()
    # Two are copied; the third is computed by both.
    assert step.num_scheduled_tokens == {"r0": 4, "r1": 2}
    assert len(step.block_copies) == 1 and step.shared_tokens == []
    runner.execute(step)


def test_a_failed_step_leaves_nothing_to_copy():
    scheduler, runner = make_scheduler(), FakeRunner(4)
    scheduler.add_request(make_request("r0", [*PREFIX, 0, 0], max_tokens=1))
    scheduler.discard_step(scheduler.schedule())
    scheduler.add_request(make_request("r1", [*PREFIX, 1], max_tokens=1))
    assert drain(scheduler, runner)[-1].num_cached_tokens == 0


def test_a_block_handed_out_for_its_own_copy_is_not_copied():
    scheduler, runner = make_scheduler(num_blocks=1), FakeRunner(4)
    scheduler.add_request(make_request("r0", [1, 2, 3, 4], max_tokens=1))
    drain(scheduler, runner)
    scheduler.add_request(make_request("r1", [1, 2, 6, 6], max_tokens=1))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r1": 2} and step.block_copies == []
    runner.execute(step)  # checks what it reads


def test_a_block_given_up_for_another_is_copied_before():
    scheduler, runner = make_scheduler(num_blocks=2), FakeRunner(4)
    scheduler.add_request(make_request("r0", [1, 2, 3, 4, 5], max_tokens=1))
    drain(scheduler, runner)
    scheduler.add_request(make_request("r1", [1, 2, 6, 6, 6, 6], max_tokens=1))
    step = scheduler.schedule()
    ((source, copy),) = step.block_copies
    assert step.scheduled_new_reqs[0].block_ids == ([copy, source],)
    assert step.num_scheduled_tokens == {"r1": 4}
    runner.execute(step)


def test_it_can_be_turned_off():
    scheduler, runner = make_scheduler(parts=False), FakeRunner(4)
    for name in ("r0", "r1"):
        scheduler.add_request(make_request(name, [*PREFIX, 0, 0], max_tokens=1))
        outputs = drain(scheduler, runner)
    assert outputs[-1].num_cached_tokens == 4


@pytest.mark.parametrize("budget", [3, 40], ids=["in chunks", "at once"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_block_that_is_not_full_lends_what_it_has(budget: int, ended: bool):
    scheduler, runner = make_scheduler(budget=budget), FakeRunner(4)
    scheduler.add_request(make_request("r0", PREFIX, max_tokens=1 if ended else 20))
    for _ in range(4):
        run_step(scheduler, runner)
    assert scheduler.has_request("r0") is not ended
    for name, prompt, cached in (("r1", [*PREFIX, 0, 0], 6), ("r2", PREFIX, 5), ("r3", [*PREFIX[:5], 0, 0], 5)):
        scheduler.add_request(make_request(name, prompt, max_tokens=1))
        while scheduler.has_request(name):
            outputs = run_step(scheduler, runner)
        assert next(each for each in outputs if each.request_id == name).num_cached_tokens == cached


def test_a_running_request_that_fills_a_block_lends_it():
    scheduler, runner = make_scheduler(), FakeRunner(4)
    scheduler.add_request(make_request("r0", PREFIX, max_tokens=9))
    for _ in range(4):
        run_step(scheduler, runner)
    request = scheduler.requests["r0"]
    said = request.token_ids[request.num_prompt_tokens :]
    seen: Counter = Counter()
    scheduler.add_request(make_request("r1", [*PREFIX, said[0], 6, 6], max_tokens=2))
    run_step(scheduler, runner, seen)
    assert seen["copied parts"] == 1
    drain(scheduler, runner)


class TestSiblings:
    def test_the_longest_beginning_wins(self):
        partial_blocks = PartialBlockIndex()
        for block, tokens in enumerate(([1, 2, 3, 4], [1, 2, 5, 6], [2, 2, 2, 2], [1, 9, 9, 9])):
            partial_blocks.add(block, b"p", tokens)
        assert partial_blocks.find(b"p", [1, 2, 5]) == (1, 3)
        assert partial_blocks.find(b"p", [1, 2, 3, 4]) == (0, 4)
        assert partial_blocks.find(b"p", [1]) in ((0, 1), (1, 1), (3, 1))
        assert partial_blocks.find(b"p", [3]) == (-1, 0)
        assert partial_blocks.find(b"q", [1, 2]) == (-1, 0)

    def test_what_is_discarded_is_gone(self):
        partial_blocks = PartialBlockIndex()
        partial_blocks.add(0, b"p", [1, 2])
        partial_blocks.add(1, b"p", [1, 3])
        partial_blocks.add(0, b"q", [5, 6])  # holds something else now
        assert partial_blocks.find(b"p", [1, 2]) == (1, 1)
        partial_blocks.discard(1)
        partial_blocks.discard(1)
        assert partial_blocks.find(b"p", [1]) == (-1, 0) and len(partial_blocks._group_of) == 1
        partial_blocks.clear()
        assert partial_blocks.find(b"q", [5]) == (-1, 0) and not partial_blocks._group_of

    @pytest.mark.parametrize("number", [15, 16, 100])
    def test_of_many_the_latest_are_compared(self, number: int):
        partial_blocks = PartialBlockIndex()
        for block in range(number):
            partial_blocks.add(block, b"p", [1, block, 7])
        found = partial_blocks.find(b"p", [1, number - 1, 8])
        assert found == (number - 1, 2)
        oldest = partial_blocks.find(b"p", [1, 0, 7])
        assert oldest == ((0, 3) if number <= 16 else (number - 1, 1))

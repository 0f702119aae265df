"""The scheduler's rules, one by one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from core_harness import FakeRunner, make_request, make_scheduler, run_step

from vllm.logprobs.lists import LogprobsLists
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.outputs import ModelRunnerOutput


def drain(scheduler, runner) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while scheduler.has_unfinished_requests():
        for output in run_step(scheduler, runner):
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
    return outputs


def test_the_core_needs_no_torch():
    code = "import sys, vllm.v1.core.sched.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_prompt_is_split_when_it_does_not_fit():
    scheduler = make_scheduler(budget=10)
    scheduler.add_request(make_request("r0", [1] * 25, max_tokens=2))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [step.total_num_scheduled_tokens for step in steps] == [10, 10, 5]


def test_decodes_come_before_the_rest_of_a_prefill():
    scheduler = make_scheduler(budget=8)
    runner = FakeRunner(4)
    scheduler.add_request(make_request("r0", [1, 2], max_tokens=20))
    run_step(scheduler, runner)
    scheduler.add_request(make_request("r1", [3] * 20))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1, "r1": 7}


def test_without_chunking_a_prompt_waits_for_a_whole_step():
    scheduler = make_scheduler(budget=48, chunked=False, num_blocks=100)
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}", [i] * 20))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 20, "r1": 20}


def test_without_chunking_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_scheduler(budget=47, chunked=False)


def test_a_prefix_is_shared_within_the_step_that_computes_it():
    scheduler = make_scheduler(budget=100)
    shared = [1, 2, 3, 4, 5, 6, 0, 1]
    scheduler.add_request(make_request("r0", [*shared, 2]))
    scheduler.add_request(make_request("r1", [*shared, 3, 3]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 9, "r1": 2}
    first, second = step.scheduled_new_reqs
    assert first.block_ids[0][:2] == second.block_ids[0][:2]
    assert second.num_computed_tokens == 8
    runner = FakeRunner(4)
    scheduler.update_from_output(step, runner.execute(step))
    assert drain(scheduler, runner)


def test_a_fully_cached_prompt_still_computes_its_last_token():
    scheduler = make_scheduler()
    runner = FakeRunner(4)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    scheduler.add_request(make_request("r0", prompt, max_tokens=1))
    drain(scheduler, runner)
    scheduler.add_request(make_request("r1", prompt, max_tokens=1))
    # The last token's block is copied: it may be computed in no block that others read.
    assert scheduler.schedule().num_scheduled_tokens == {"r1": 1}


def test_salts_keep_prefixes_apart():
    scheduler = make_scheduler(budget=100)
    for i, salt in enumerate([None, "a", "b", "a"]):
        scheduler.add_request(make_request(f"r{i}", [1] * 9, salt=salt))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 9, "r1": 9, "r2": 9, "r3": 1}


def test_generated_tokens_are_found_by_the_next_turn():
    scheduler = make_scheduler()
    runner = FakeRunner(4)
    prompt = [1, 2, 3]
    scheduler.add_request(make_request("r0", prompt, max_tokens=10))
    answer = drain(scheduler, runner)["r0"]
    scheduler.add_request(make_request("r1", [*prompt, *answer, 5], max_tokens=1))
    # 12 of the 13 tokens have KV: the last generated one was never fed back.
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 12


def test_the_last_come_is_preempted_and_comes_back():
    scheduler = make_scheduler(num_blocks=8, budget=100, caching=False)
    runner = FakeRunner(4)
    scheduler.add_request(make_request("r0", [1] * 14, max_tokens=10))
    scheduler.add_request(make_request("r1", [2] * 14, max_tokens=10))
    preempted = []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        preempted += step.preempted_req_ids
        scheduler.update_from_output(step, runner.execute(step))
    assert set(preempted) == {"r1"}
    assert scheduler.stats().num_preemptions == len(preempted)


def test_priority_decides_who_runs_and_who_is_preempted():
    scheduler = make_scheduler(num_blocks=8, budget=100, policy="priority", caching=False, max_num_seqs=2)
    runner = FakeRunner(2)
    scheduler.add_request(make_request("r0", [1] * 14, max_tokens=10, priority=5))
    scheduler.add_request(make_request("r1", [2] * 14, max_tokens=10, priority=1))
    scheduler.add_request(make_request("r2", [3] * 14, max_tokens=10, priority=9))
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["r1", "r0"]
    scheduler.update_from_output(step, runner.execute(step))
    finished, preempted = [], []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        preempted += step.preempted_req_ids
        outputs = scheduler.update_from_output(step, runner.execute(step))
        finished += [output.request_id for output in outputs if output.finish_reason]
    assert finished == ["r1", "r0", "r2"]
    assert "r1" not in preempted
    assert "r0" in preempted


def test_priority_ties_go_by_arrival_not_by_name():
    scheduler = make_scheduler(budget=100, num_blocks=100, policy="priority", max_num_seqs=20)
    for i in range(12):
        request = make_request(f"r{i}", [1] * 3)
        request.arrival_time = 0.0
        scheduler.add_request(request)
    assert list(scheduler.schedule().num_scheduled_tokens) == [f"r{i}" for i in range(12)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_aborted_name_can_be_used_again(policy):
    scheduler = make_scheduler(policy=policy)
    for _ in range(3):
        scheduler.add_request(make_request("r0", [1] * 3, max_tokens=1))
        scheduler.abort_requests(["r0"])
    scheduler.add_request(make_request("r0", [1] * 3, max_tokens=1))
    assert list(drain(scheduler, FakeRunner(4))) == ["r0"]


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("r0", [1] * 13, max_tokens=4))
    with pytest.raises(ValueError, match=r"17 tokens.*prompt 13.*max_tokens 5.*holds 16"):
        scheduler.add_request(make_request("r1", [1] * 13, max_tokens=5))
    with pytest.raises(ValueError, match="1 to 48"):
        scheduler.add_request(make_request("r2", []))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add_request(make_request("r0", [1]))


def test_a_request_that_a_guest_refuses_has_ended_for_all():
    class Notes(SchedulerGuest):
        def __init__(self):
            self.requests = []

        def queued(self, request):
            self.requests.append(request)

        def ended(self, request):
            self.requests.remove(request)

    class Refuses(SchedulerGuest):
        def queued(self, request):
            raise ValueError("too large")

    scheduler, notes = make_scheduler(), Notes()
    scheduler.use_guests([notes, Refuses()])
    with pytest.raises(ValueError, match="too large"):
        scheduler.add_request(make_request("r0", [1, 2, 3]))
    assert not notes.requests and not scheduler.has_unfinished_requests()


def finish_of(request, tokens: list[int]):
    """Feed one request the given tokens until it finishes: (tokens taken, finish_reason, stop_reason)."""
    scheduler = make_scheduler(budget=48)
    scheduler.add_request(request)
    for taken, token in enumerate(tokens, 1):
        step = scheduler.schedule()
        result = ModelRunnerOutput([request.request_id], np.array([token], np.int32), [None])
        (output,) = scheduler.update_from_output(step, result)
        if output.finish_reason:
            return taken, output.finish_reason, output.stop_reason
    return None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eos": [6]}, (3, "stop", None)),
        ({"eos": [6], "ignore_eos": True}, (5, "length", None)),
        ({"stop_token_ids": [5]}, (2, "stop", 5)),
        ({"eos": [5], "stop_token_ids": [5]}, (2, "stop", None)),
        ({"stop_token_ids": [5], "min_tokens": 3}, (4, "stop", 5)),
        ({"eos": [6], "min_tokens": 4}, (5, "stop", None)),
        ({"max_tokens": 2}, (2, "length", None)),
        ({"max_tokens": 1, "eos": [1]}, (1, "stop", None)),
    ],
)
def test_stops(fields, expected):
    fields = {"max_tokens": 5, **fields}
    assert finish_of(make_request("r0", [1, 2], **fields), [1, 5, 6, 5, 6, 0]) == expected


def test_the_context_ends_a_request():
    assert finish_of(make_request("r0", [1] * 45, max_tokens=100), [0] * 9) == (3, "length", None)


def test_readings_pass_only_to_those_who_asked():
    scheduler = make_scheduler(budget=48)
    scheduler.add_request(make_request("r0", [1]))
    scheduler.add_request(make_request("r1", [2], logprob_token_ids=[3]))
    scheduler.add_request(make_request("r2", [3], logprobs=0))
    empty = np.zeros((3, 1))
    rows = [(LogprobsLists(empty, empty, empty, empty, empty[:, 0], 0), i) for i in range(3)]
    result = ModelRunnerOutput(["r0", "r1", "r2"], np.zeros(3, np.int32), list(rows))
    outputs = scheduler.update_from_output(scheduler.schedule(), result)
    assert [output.logprobs for output in outputs] == [None, [rows[1]], [rows[2]]]


def test_a_failed_step_takes_its_requests_and_leaves_no_content():
    scheduler = make_scheduler(budget=12, max_num_seqs=2)
    runner = FakeRunner(2)
    scheduler.add_request(make_request("r0", [1] * 9))
    run_step(scheduler, runner)
    scheduler.add_request(make_request("r1", [2] * 9))
    scheduler.add_request(make_request("r2", [3] * 9))
    assert set(scheduler.discard_step(scheduler.schedule())) == {"r0", "r1"}
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    # The earlier step's blocks are still good, those of the failed one are not there.
    scheduler.add_request(make_request("r3", [1] * 9))
    scheduler.add_request(make_request("r4", [2] * 9))
    assert scheduler.kv.find_prefix(scheduler.requests["r3"]).num_blocks
    assert not scheduler.kv.find_prefix(scheduler.requests["r4"]).num_blocks
    assert set(drain(scheduler, runner)) == {"r2", "r3", "r4"}


def test_abort_in_every_state():
    scheduler = make_scheduler(max_num_seqs=1)
    runner = FakeRunner(1)
    scheduler.add_request(make_request("r0", [1] * 5))
    scheduler.add_request(make_request("r1", [2] * 5))
    step = scheduler.schedule()
    scheduler.abort_requests(["r1", "r0", "nobody"])
    assert scheduler.update_from_output(step, runner.execute(step)) == []
    assert not scheduler.has_unfinished_requests()
    assert sorted(scheduler.schedule().finished_req_ids) == ["r0", "r1"]


class TestPromptReadings:
    def run(self, scheduler, runner, *requests):
        for request in requests:
            scheduler.add_request(request)
        outputs = []
        while scheduler.has_unfinished_requests():
            outputs += run_step(scheduler, runner)
        return outputs

    def rows_read(self, outputs, request_id):
        return sum(
            rows.rows.stop - rows.rows.start
            for output in outputs
            if output.request_id == request_id
            for rows in output.prompt_logprobs or ()
        )

    def test_a_prefix_cached_without_hidden_states_is_computed_again_from_the_first_position_read(self):
        scheduler, runner = make_scheduler(), FakeRunner(4)
        prompt = list(range(7)) * 2
        self.run(scheduler, runner, make_request("r0", prompt, 1))
        outputs = self.run(scheduler, runner, make_request("r1", prompt, 1, prompt_logprobs=0, prompt_logprob_start=9))
        # Positions 9 to 12 are read; blocks 0 and 1 and a token of block 2 come before them.
        assert self.rows_read(outputs, "r1") == 4
        assert outputs[-1].num_cached_tokens == 9

    def test_the_second_reader_of_a_prompt_finds_hidden_states(self):
        scheduler, runner = make_scheduler(), FakeRunner(4)
        prompt = list(range(7)) * 2
        self.run(scheduler, runner, make_request("r0", prompt, 1))
        for request_id, cached in (("r1", 0), ("r2", 12)):
            outputs = self.run(scheduler, runner, make_request(request_id, prompt, 1, prompt_logprobs=0))
            assert self.rows_read(outputs, request_id) == 13
            assert outputs[-1].num_cached_tokens == cached
        assert runner.num_cached_rows == 12

    def test_hidden_states_of_generated_tokens_are_not_kept(self):
        scheduler, runner = make_scheduler(), FakeRunner(4)
        prompt = [1, 2, 3, 4, 5, 6]
        outputs = self.run(scheduler, runner, make_request("r0", prompt, 8, prompt_logprobs=0))
        said = [token for output in outputs for token in output.new_token_ids]
        longer = [*prompt, *said, 0, 1]
        outputs = self.run(scheduler, runner, make_request("r1", longer, 1, prompt_logprobs=0))
        assert self.rows_read(outputs, "r1") == len(longer) - 1
        assert outputs[-1].num_cached_tokens == 4

    def test_nothing_is_sampled_with_max_tokens_0(self):
        scheduler, runner = make_scheduler(), FakeRunner(4)
        (output,) = self.run(scheduler, runner, make_request("r0", [1] * 48, 0))
        assert (output.new_token_ids, output.finish_reason) == ([], "length")

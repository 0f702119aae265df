"""Recurrent states under random arrivals, aborts, failures and preemptions: each request goes on from its own state."""

from __future__ import annotations

import random
from collections import Counter

from core_harness import BLOCK_SIZE, FakeRunner, make_request, make_scheduler, run_step
from guests import guest_of
from test_scheduler_properties import Run, assert_reached, random_workload

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.features.states.scheduler import Snapshots, StepStates
from vllm.v1.outputs import ModelRunnerOutput


def snapshots_of(scheduler: Scheduler) -> Snapshots:
    return guest_of(scheduler, Snapshots)


class StateRunner(FakeRunner):
    """Also holds a state for each request: the tokens that it has seen, in order."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.states: dict[str, list] = {}
        self.snapshots: dict[int, list] = {}
        self.num_loads = self.num_tokens = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        states = step.parts.of(StepStates) or StepStates()
        for new in step.scheduled_new_reqs:
            self.states[new.req_id] = []
        for snapshot, req_id in states.loads:
            self.states[req_id] = list(self.snapshots[snapshot])
            self.num_loads += 1
        output = super().execute(step)
        for req_id, count in step.num_scheduled_tokens.items():
            state, end = self.states[req_id], self.computed[req_id]
            assert len(state) == end - count, f"{req_id} has {len(state)} tokens in its state"
            state += self.tokens[req_id][end - count : end]
            assert state == self.tokens[req_id][:end], f"{req_id} has another's state"
            self.num_tokens += count
        targets = [snapshot for _, snapshot in states.saves]
        assert len(targets) == len(set(targets)), "two states in one snapshot"
        for req_id, snapshot in states.saves:
            assert len(self.states[req_id]) % BLOCK_SIZE == 0
            self.snapshots[snapshot] = list(self.states[req_id])
        return output


class StateRun(Run):
    def __init__(self, options: dict, seen: Counter) -> None:
        super().__init__(options, seen)
        self.runner = StateRunner(options["max_num_seqs"])

    def finish(self) -> None:
        super().finish()
        self.seen["loads"] += self.runner.num_loads
        snapshots = snapshots_of(self.scheduler)
        if not self.scheduler.kv.enable_caching:
            assert snapshots is None
            return
        assert not (snapshots._counted or snapshots._num_waiting or snapshots._save_at or snapshots._last_saved)
        pool = snapshots.pool
        assert sorted([*pool._unused, *pool._snapshot_of.values()]) == list(range(pool.num_snapshots))


def test_states_follow_their_requests() -> None:
    seen: Counter = Counter()
    for seed in range(250):
        rng = random.Random(seed)
        options, actions = random_workload(rng)
        options |= {"snapshots": rng.choice([1, 3, 20]), "interval": rng.choice([BLOCK_SIZE, 2 * BLOCK_SIZE, 64])}
        run = StateRun(options, seen)
        run.play(actions)
        run.finish()
    assert_reached(seen, ("preemptions", "prefix hits", "evictions", "aborts of running", "broken requests", "loads"))


def run_all(scheduler, runner) -> None:
    while scheduler.has_unfinished_requests():
        run_step(scheduler, runner)


def test_a_common_beginning_is_computed_once() -> None:
    scheduler, runner = make_scheduler(snapshots=20, interval=64, max_num_seqs=8, budget=200), StateRunner(8)
    suffixes = [[2, 3], [3], [4, 5, 6], [5, 2, 2, 2, 2], [6]]
    for number, suffix in enumerate(suffixes):
        scheduler.add_request(make_request(f"r{number}", [1] * 21 + suffix, max_tokens=1))
    run_all(scheduler, runner)
    # 20 of the 21 common tokens are whole blocks.
    assert runner.num_tokens == 20 + sum(1 + len(suffix) for suffix in suffixes)


def test_what_a_failed_step_was_to_save_is_not_found() -> None:
    scheduler = make_scheduler(snapshots=4)
    prompt = list(range(7)) * 2
    scheduler.add_request(make_request("r0", prompt, max_tokens=1))
    step = scheduler.schedule()
    assert step.parts.of(StepStates).saves
    assert scheduler.discard_step(step) == ["r0"]
    assert len(snapshots_of(scheduler).pool) == 0
    scheduler.add_request(make_request("r1", prompt, max_tokens=1))
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 0


def test_what_a_broken_request_saved_is_not_found() -> None:
    scheduler, runner = make_scheduler(snapshots=4, interval=BLOCK_SIZE), StateRunner(4)
    scheduler.add_request(make_request("r0", [1] * 14, max_tokens=1))
    run_step(scheduler, runner)
    step = scheduler.schedule()
    output = ModelRunnerOutput([], runner.execute(step).sampled_token_ids[:0], [], errors={"r0": "NaN"})
    scheduler.update_from_output(step, output)
    assert len(snapshots_of(scheduler).pool) == 0

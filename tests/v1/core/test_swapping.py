"""Blocks that go to the host and come back, case by case; test_scheduler_properties.py has what nobody thought of."""

from __future__ import annotations

import numpy as np
from core_harness import BLOCK_SIZE, FakeRunner, make_request, make_scheduler, run_step, swaps_of

from vllm.v1.outputs import ModelRunnerOutput

FIRST, SECOND = [1] * 17, [2] * 17
NUM_FULL = len(FIRST) // BLOCK_SIZE


def make(**options):
    options = {"num_blocks": 5, "host_blocks": 20, "budget": 100, **options}
    scheduler = make_scheduler(**options)
    return scheduler, FakeRunner(scheduler.config.max_num_seqs)


def make_used(**options):
    """FIRST is on the host, SECOND on the device."""
    scheduler, runner = make(**options)
    for number, prompt in enumerate([FIRST, SECOND]):
        scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=1))
        run_step(scheduler, runner)
    return scheduler, runner


def test_what_makes_room_is_copied_once_and_comes_back():
    scheduler, runner = make()
    copies = []
    for number, prompt in enumerate([FIRST, SECOND, FIRST, SECOND, FIRST]):
        scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=1))
        step = scheduler.schedule()
        copies.append((len(swaps_of(step).out), len(swaps_of(step).back), step.total_num_scheduled_tokens))
        scheduler.update_from_output(step, runner.execute(step))
    # The blocks of the third and later ones are on the host already: nothing leaves twice.
    assert copies == [(0, 0, 17), (4, 0, 17), (4, 4, 1), (0, 4, 1), (0, 4, 1)]
    stats = scheduler.stats()
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (8, 12)
    assert stats.host_cache_usage == 2 * NUM_FULL / 20
    assert stats.num_prefix_hit_tokens == 3 * 16


def test_a_preempted_request_computes_its_last_block_only():
    scheduler, runner = make(num_blocks=10, max_num_seqs=2)
    for number, prompt in enumerate([FIRST, SECOND]):
        scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=20))
    while not scheduler.num_preemptions:
        run_step(scheduler, runner)
    victim = scheduler.requests["r1"]
    assert victim.num_computed_tokens == 0
    while scheduler.has_request("r0"):
        run_step(scheduler, runner)
    step = scheduler.schedule()
    assert 1 <= step.num_scheduled_tokens["r1"] <= BLOCK_SIZE
    assert swaps_of(step).back


def test_a_step_that_fails_has_copied_nothing():
    scheduler, _ = make_used()
    scheduler.add_request(make_request("r2", FIRST, max_tokens=1))
    step = scheduler.schedule()
    assert swaps_of(step).out and swaps_of(step).back
    scheduler.discard_step(step)
    kv = scheduler.kv
    # SECOND may not have arrived on the host, FIRST not on the device; the host's FIRST is as good as it was.
    assert kv.find_prefix(make_request("r3", SECOND)).num_blocks == 0
    assert kv.find_prefix(make_request("r4", FIRST)).num_blocks == NUM_FULL


def test_copies_of_what_is_broken_are_forgotten():
    scheduler, runner = make_used()
    scheduler.add_request(make_request("r2", FIRST, max_tokens=1))
    step = scheduler.schedule()
    runner.execute(step)
    broken = ModelRunnerOutput([], np.empty(0, np.int32), [], errors={"r2": "broken"})
    scheduler.update_from_output(step, broken)
    assert scheduler.kv.find_prefix(make_request("r3", FIRST)).num_blocks == 0
    assert scheduler.kv.find_prefix(make_request("r4", SECOND)).num_blocks == NUM_FULL


def test_positions_to_be_read_are_computed_again():
    scheduler, _ = make_used()
    request = make_request("r2", FIRST, max_tokens=1, prompt_logprobs=0, prompt_logprob_start=9)
    # Two blocks lie before position 9.
    assert scheduler.kv.find_prefix(request).num_blocks == 2


def test_a_reset_forgets_the_hosts_blocks():
    scheduler, _ = make_used()
    assert scheduler.reset_prefix_cache()
    assert scheduler.kv.find_prefix(make_request("r3", FIRST)).num_blocks == 0
    assert scheduler.stats().host_cache_usage == 0

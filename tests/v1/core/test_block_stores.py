"""A guest that keeps evicted blocks elsewhere: any, not only the host's memory."""

from __future__ import annotations

import numpy as np
from core_harness import BLOCK_SIZE, FakeRunner, make_request, make_scheduler, run_step

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.outputs import ModelRunnerOutput

PROMPTS = [[number] * 17 for number in range(1, 4)]
NUM_FULL = 17 // BLOCK_SIZE


class Store(SchedulerGuest):
    """Keeps what it is given, of keys that it wants; notes what it is asked."""

    def __init__(self, wants=lambda key: True):
        self.wants = wants
        self.held: dict[bytes, list] = {}
        self.runner: FakeRunner | None = None
        self.kept, self.broken_keys, self.lost_keys = [], [], []

    def take(self, key, block_id, step):
        if not self.wants(key):
            return False
        # The block holds the content until the step writes.
        self.held[key] = [self.runner.cells[block_id, offset] for offset in range(BLOCK_SIZE)]
        return True

    def holds(self, key):
        return key in self.held

    def keep(self, keys):
        self.kept += keys

    def bring(self, key, block_id, step):
        if key not in self.held:
            return False
        for offset, cell in enumerate(self.held[key]):
            self.runner.cells[block_id, offset] = cell
        return True

    def lost(self, key):
        self.lost_keys.append(key)

    def broken(self, request, keys):
        self.broken_keys += keys

    def reset_cache(self):
        self.held.clear()


def make(*stores, num_blocks=5):
    scheduler = make_scheduler(num_blocks=num_blocks, budget=100, parts=False)
    scheduler.use_guests([*scheduler.guests, *stores])
    runner = FakeRunner(scheduler.config.max_num_seqs)
    for store in stores:
        store.runner = runner
    return scheduler, runner


def run(scheduler, runner, req_id, prompt):
    """How many tokens of the prompt were found; the runner checks that these are the right ones."""
    before = scheduler.kv.stats.num_prefix_hit_tokens
    scheduler.add_request(make_request(req_id, prompt, max_tokens=1))
    while scheduler.has_unfinished_requests():
        run_step(scheduler, runner)
    return scheduler.kv.stats.num_prefix_hit_tokens - before


def test_what_is_evicted_is_brought_back():
    store = Store()
    scheduler, runner = make(store)
    for number, prompt in enumerate(PROMPTS):
        assert run(scheduler, runner, f"r{number}", prompt) == 0
    assert run(scheduler, runner, "r9", PROMPTS[0]) == NUM_FULL * BLOCK_SIZE
    assert set(store.kept) <= set(store.held) and not store.lost_keys
    assert scheduler.reset_prefix_cache() and not store.held
    assert run(scheduler, runner, "r10", PROMPTS[0]) == 0


def test_the_first_store_that_takes_a_block_has_it_and_what_none_takes_is_lost():
    first, second = Store(lambda key: key[0] % 2), Store(lambda key: key[0] % 3)
    scheduler, runner = make(first, second)
    for number, prompt in enumerate(PROMPTS):
        run(scheduler, runner, f"r{number}", prompt)
    assert first.held and second.held and not first.held.keys() & second.held.keys()
    assert first.lost_keys == second.lost_keys
    assert all(not key[0] % 2 and not key[0] % 3 for key in first.lost_keys)


def test_blocks_that_a_failed_step_was_to_fill_are_not_found():
    store = Store()
    scheduler, runner = make(store)
    for number, prompt in enumerate(PROMPTS):
        run(scheduler, runner, f"r{number}", prompt)
    scheduler.add_request(make_request("r9", PROMPTS[0], max_tokens=1))
    step = scheduler.schedule()
    assert len(step.brought_blocks) == NUM_FULL
    assert scheduler.discard_step(step) == ["r9"]
    assert all(scheduler.kv.pool.unregister(block) is None for block in step.brought_blocks)


def test_a_store_hears_of_broken_content():
    store = Store()
    scheduler, runner = make(store, num_blocks=20)
    scheduler.add_request(make_request("r0", PROMPTS[0], max_tokens=1))
    step = scheduler.schedule()
    runner.execute(step)
    scheduler.update_from_output(step, ModelRunnerOutput([], np.empty(0, np.int32), [], errors={"r0": "NaN"}))
    assert len(store.broken_keys) == NUM_FULL
    assert run(scheduler, runner, "r1", PROMPTS[0]) == 0

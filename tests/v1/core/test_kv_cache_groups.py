"""Several KV groups: what is held, found, released, preempted and swapped, over a model that checks its reads."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from core_harness import BLOCK_SIZE, VOCAB, FakeRunner, make_request, make_scheduler, next_token

from vllm.config.cache import Chunks
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.block_pool import hash_full_blocks
from vllm.v1.core.kv_cache_groups import NO_BLOCK, blocks_needed
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import NO_TOKEN, ModelRunnerOutput

WINDOWS = {
    "full and window": (None, 6),
    "several of a window": (None, 5, 5, 5),
    "windows alone": (7,),
    "two windows": (3, 9),
    "full and chunks": (None, Chunks(8)),
    "chunks across blocks": (Chunks(6), 5),
}


def make_grouped_scheduler(windows, num_blocks=64, **options) -> Scheduler:
    return make_scheduler(num_blocks, windows=windows, **options)


class GroupedRunner(FakeRunner):
    """Cells also say of which group they are; a query reads the tokens of its window in each group."""

    def __init__(self, max_num_seqs, windows):
        super().__init__(max_num_seqs)
        self.windows = windows
        self.tables: dict[str, list[list[int]]] = {}

    def execute(self, step):
        self._swap(step)
        self._update(step)
        cached = step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            groups = added or [[]] * len(self.windows)
            assert len({len(each) for each in groups}) == 1
            for table, blocks in zip(self.tables[req_id], groups, strict=True):
                table += blocks
        counts = step.num_scheduled_tokens
        for req_id, count in counts.items():
            for position in range(self.computed[req_id], self.computed[req_id] + count):
                for group in range(len(self.windows)):
                    cell = self._cell_of(group, req_id, position)
                    self.cells[cell] = (group, self._key(req_id, position))
                    self.hidden[cell] = self._key(req_id, position) if position in self.keeps[req_id] else ("none",)
        prompts = {req_id: self._read_prompt(req_id, count) for req_id, count in counts.items()}
        req_ids, sampled = [], []
        for req_id, count in counts.items():
            self._check_reads(req_id, count)
            self.computed[req_id] += count
            if self.computed[req_id] == len(self.tokens[req_id]):
                token = next_token(self.tokens[req_id])
                self.tokens[req_id].append(token)
                req_ids.append(req_id)
                sampled.append(token)
        rows = {req_id: each for req_id, each in prompts.items() if each}
        return ModelRunnerOutput(req_ids, np.array(sampled, np.int32), [None] * len(req_ids), prompt_logprobs=rows)

    def _check_reads(self, req_id, count):
        begin = self.computed[req_id]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(begin - window + 1, 0) if isinstance(window, int) else None
            first = begin // window.size * window.size if first is None else first
            for position in range(first, begin + count):
                found = self.cells.get(self._cell_of(group, req_id, position))
                assert found == (group, self._key(req_id, position)), f"{req_id} reads {found} at {position} of {group}"

    def _cell_of(self, group, req_id, position):
        return self.tables[req_id][group][position // BLOCK_SIZE], position % BLOCK_SIZE


def check_blocks(scheduler):
    """Every block has as many owners as its count says, or is free; a group holds no more than it needs."""
    kv = scheduler.kv
    pool, held = kv.pool, Counter()
    for request in scheduler.running:
        groups = kv.owned[request.request_id].groups
        assert len({len(blocks) for blocks in groups}) == 1
        for blocks in groups:
            held.update(block for block in blocks if block != NO_BLOCK)
    assert {block: count for block, count in enumerate(pool.ref_counts) if count} == held
    free = [*pool._uncached, *pool._evictable]
    assert sorted(free) == sorted(set(range(pool.num_blocks)) - set(held))
    assert {content: block for block, content in pool._hash_of.items()} == pool._block_of
    assert set(kv.owned) == {request.request_id for request in scheduler.running}


def run(scheduler, runner, steps=10_000, each_step=lambda: None):
    tokens: dict[str, list[int]] = {}
    for _ in range(steps):
        if not scheduler.has_unfinished_requests():
            return tokens
        step = scheduler.schedule()
        check_blocks(scheduler)
        for output in scheduler.update_from_output(step, runner.execute(step)):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_blocks(scheduler)
        each_step()
    raise AssertionError("the requests do not end")


def continued(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("host_blocks", [0, 20])
@pytest.mark.parametrize("caching", [True, False])
def test_random_traffic(windows, host_blocks, caching):
    # The longest request needs nearly all blocks, so that others are preempted.
    num_blocks = blocks_needed(40, 16, windows, BLOCK_SIZE) + 2
    scheduler = make_grouped_scheduler(windows, num_blocks, host_blocks=host_blocks, caching=caching)
    runner, generator = GroupedRunner(4, windows), random.Random(1)
    stems = [[generator.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    prompts = {}
    for index in range(60):
        stem = generator.choice(stems)[: generator.randint(1, 30)]
        prompts[f"r{index}"] = stem + [generator.randrange(VOCAB) for _ in range(generator.randint(0, 3))]
        reads = {"prompt_logprob_token_ids": [1]} if index % 5 == 0 else {}
        scheduler.add_request(make_request(f"r{index}", prompts[f"r{index}"], 7, **reads))
    tokens = run(scheduler, runner)
    assert tokens == {req_id: continued(prompt, 7) for req_id, prompt in prompts.items()}
    assert scheduler.num_preemptions > 0
    assert (scheduler.kv.stats.num_prefix_hit_tokens > 0) is caching
    if host_blocks and caching:
        assert scheduler.stats().num_swapped_in_blocks > 0


def test_a_window_holds_its_tokens_and_a_steps():
    windows, budget = (None, 8), 12
    scheduler = make_grouped_scheduler(windows, budget=budget, max_model_len=200)
    scheduler.add_request(make_request("r0", [index % VOCAB for index in range(90)], 60))
    most = Counter()

    def count():
        for group, blocks in enumerate(groups_of(scheduler)):
            most[group] = max(most[group], sum(block != NO_BLOCK for block in blocks))

    run(scheduler, GroupedRunner(4, windows), each_step=count)
    # The last step, which computes token 149, ends the request.
    assert most[0] == -(-148 // BLOCK_SIZE)
    assert most[1] <= -(-(8 - 1 + budget) // BLOCK_SIZE) + 1
    # While tokens are generated one by one, the window alone.
    assert blocks_needed(150, 1, (8,), BLOCK_SIZE) == 3


def test_chunks_hold_their_tokens_and_a_steps():
    windows, budget = (None, Chunks(8)), 12
    scheduler = make_grouped_scheduler(windows, budget=budget, max_model_len=200)
    scheduler.add_request(make_request("r0", [index % VOCAB for index in range(90)], 60))
    held = []

    def count():
        for blocks in groups_of(scheduler)[1:]:
            held.append(sum(block != NO_BLOCK for block in blocks))

    run(scheduler, GroupedRunner(4, windows), each_step=count)
    assert max(held) <= blocks_needed(150, budget, windows[1:], BLOCK_SIZE)
    # A chunk's first token needs one block, its last one two.
    assert {1, 2} <= set(held[-20:]) <= {1, 2, 3}


def test_a_prefix_hit_holds_in_every_group():
    windows = (None, 6)
    scheduler = make_grouped_scheduler(windows, max_model_len=60)
    runner, prompt = GroupedRunner(4, windows), [index % VOCAB for index in range(33)]
    scheduler.add_request(make_request("r0", prompt, 1))
    run(scheduler, runner)
    pool = scheduler.kv.pool

    def num_hit(req_id, tokens):
        before = scheduler.kv.stats.num_prefix_hit_tokens
        scheduler.add_request(make_request(req_id, tokens, 1))
        run(scheduler, runner)
        return scheduler.kv.stats.num_prefix_hit_tokens - before

    assert num_hit("r1", [*prompt, 1, 2]) == 32
    # Without a block that the window's group needs, the hit is shorter: at 28 its window begins in the sixth block.
    hashes = make_hashes(prompt)
    pool.unregister(pool.find(scheduler.kv.groups[1].key(hashes[7])))
    assert num_hit("r2", [*prompt[:32], 3, 3]) == 28
    # A block before the window is not missed in its group, but it is in the other.
    pool.unregister(pool.find(scheduler.kv.groups[1].key(hashes[0])))
    assert num_hit("r3", [*prompt[:32], 4, 4]) == 32
    pool.unregister(pool.find(hashes[2]))
    assert num_hit("r4", [*prompt[:32], 5, 5]) == 0


def groups_of(scheduler):
    owned = scheduler.kv.owned.get("r0")
    return () if owned is None else owned.groups


def make_hashes(tokens):
    return hash_full_blocks(tokens, BLOCK_SIZE, None, [])


def test_requests_that_cannot_fit_are_refused():
    scheduler = make_grouped_scheduler((None, 4), num_blocks=8, budget=4, max_model_len=100)
    held = scheduler.kv.capacity(4)
    assert blocks_needed(held, 4, (None, 4), BLOCK_SIZE) <= 8 < blocks_needed(held + 1, 4, (None, 4), BLOCK_SIZE)
    with pytest.raises(VLLMValidationError, match=f"but the cache holds {held}"):
        scheduler.add_request(make_request("r0", [1] * held, 2))
    scheduler.add_request(make_request("r1", [1] * held, 1))
    assert len(run(scheduler, GroupedRunner(4, (None, 4)))["r1"]) == 1
    # A window alone holds any length.
    assert make_grouped_scheduler((4,), num_blocks=8).kv.capacity(4) > 10**9


def test_a_preempted_request_in_flight_gives_all_groups_back():
    scheduler = make_grouped_scheduler((None, 4))
    scheduler.add_request(make_request("r0", [1] * 20, 9))
    step = scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert NO_TOKEN not in step.num_scheduled_tokens
    assert len(run(scheduler, GroupedRunner(4, (None, 4)))["r0"]) == 9

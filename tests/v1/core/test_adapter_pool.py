"""Adapters are loaded, evicted, replaced and removed; requests of more of them than may run together take turns."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from core_harness import BLOCK_SIZE, VOCAB, FakeRunner, make_request, make_scheduler, run_step

from vllm.config import LoRAConfig, SchedulerConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.whole_requests import WholeRequestScheduler
from vllm.v1.features.adapters.pool import AdapterPool
from vllm.v1.features.adapters.scheduler import AdapterTurns, StepAdapters


class FakeWorkers:
    """Hold what stands in `files` when they load it."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.held: dict[int, str] = {}
        self.most_held = 0

    def call(self, method: str, args: tuple) -> list[bool]:
        if method == "remove_lora":
            del self.held[args[0]]
            return [True]
        assert method == "add_lora"
        (request,) = args
        assert request.lora_int_id not in self.held, "a number is used again"
        if request.lora_path not in self.files:
            raise ValueError(f"{request.lora_path}: there is no adapter")
        self.held[request.lora_int_id] = self.files[request.lora_path]
        self.most_held = max(self.most_held, len(self.held))
        return [True]


@pytest.fixture
def workers():
    found = FakeWorkers()
    found.files = {f"/{name}": name for name in "abcdefgh"}
    return found


def lora(number, path=None, **fields):
    name = "abcdefgh"[number - 1]
    return LoRARequest(name, number, path or f"/{name}", **fields)


def make_pool(workers, **config):
    return AdapterPool(LoRAConfig(**config), workers.call, patience=3)


def test_the_least_recently_used_goes(workers):
    pool = make_pool(workers, max_loras=1, max_cpu_loras=2)
    for number in (1, 2, 1, 3):
        assert pool.add(lora(number))
    assert pool.loaded_ids() == {1, 3} and sorted(workers.held.values()) == ["a", "c"]
    assert workers.most_held == 3, "an adapter is read before another goes"
    assert pool.remove(1) and not pool.remove(1) and not pool.remove(2)
    assert list(workers.held.values()) == ["c"]


def test_pinned_ones_stay(workers):
    pool = make_pool(workers, max_cpu_loras=2)
    pool.add(lora(1))
    assert pool.pin(1) and pool.pin(1)
    for number in (2, 3, 4):
        pool.add(lora(number))
    assert pool.loaded_ids() == {1, 4}
    assert pool.pin(4)
    with pytest.raises(VLLMValidationError, match="no adapter has the id 2"):
        pool.pin(2)
    pool.add(lora(2))
    assert pool.loaded_ids() == {1, 4}, "it was read, and could not stay"
    pool.remove(1)
    pool.add(lora(2))
    assert pool.loaded_ids() == {2, 4}


def test_a_damaged_adapter_changes_nothing(workers):
    pool = make_pool(workers, max_cpu_loras=2)
    pool.add(lora(1))
    pool.add(lora(2))
    before = dict(workers.held)
    with pytest.raises(ValueError, match="/nowhere"):
        pool.add(lora(3, "/nowhere"))
    del workers.files["/a"]
    with pytest.raises(ValueError, match="/a"):
        pool.add(lora(1, load_inplace=True))
    assert workers.held == before and pool.loaded_ids() == {1, 2}


def test_an_id_is_of_one_path_until_it_is_replaced(workers):
    pool = make_pool(workers)
    pool.add(lora(1))
    for refuse in (pool.add, pool.bind):
        with pytest.raises(VLLMValidationError, match="lora_int_id 1 is adapter 'a' of another path"):
            refuse(LoRARequest("other", 1, "/b"))
    assert pool.add(LoRARequest("other", 1, "/b", load_inplace=True))
    assert list(workers.held) == [2] and list(workers.held.values()) == ["b"]


def test_running_requests_finish_with_what_they_began_with(workers):
    pool = make_pool(workers, max_loras=2)
    first = pool.bind(lora(1))
    assert pool.make_ready(first) is None
    pool.begin(first)
    workers.files["/a"] = "newer"
    pool.add(lora(1, load_inplace=True))
    assert sorted(workers.held.values()) == ["a", "newer"]
    second = pool.bind(lora(1))
    assert second is not first and workers.held[second.number] == "newer"
    assert pool.remove(1) and list(workers.held.values()) == ["a"]
    pool.end(first)
    pool.release(first)
    assert not workers.held
    # One that waits is served nevertheless.
    assert pool.make_ready(second) is None and list(workers.held.values()) == ["newer"]
    pool.begin(second)
    pool.end(second)
    pool.release(second)
    assert not workers.held and not pool.loaded_ids()


class AdapterRunner(FakeRunner):
    """Its tokens depend on the load of the request's adapter; it checks how many of them it is given."""

    def __init__(self, workers: FakeWorkers, max_loras: int, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.workers, self.max_loras = workers, max_loras
        self.served: dict[str, str | None] = {}

    def _update(self, step):
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self.salts.pop(req_id, None)
        super()._update(step)
        for new in step.scheduled_new_reqs:
            if (adapter := (step.parts.of(StepAdapters) or {}).get(new.req_id)) is not None:
                number = adapter.lora_int_id
                self.salts[new.req_id] = f"adapter {number}"
                self.served[new.req_id] = self.workers.held[number]
        assert len({self.salts[each] for each in self.tokens if each in self.salts}) <= self.max_loras
        # No adapter with a slot was unloaded.
        assert all(int(salt.split()[1]) in self.workers.held for salt in self.salts.values())


@pytest.mark.parametrize("snapshots", [None, 6])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(workers, seed, snapshots):
    """Adapters come, go and change on the disk meanwhile; every request ends, none reads what another adapter wrote."""
    draw = random.Random(seed)
    max_loras, kept = draw.choice([(1, 1), (1, 3), (2, 2), (3, 4)])
    pool = make_pool(workers, max_loras=max_loras, max_cpu_loras=kept)
    scheduler = make_scheduler(num_blocks=draw.choice([16, 64]), snapshots=snapshots)
    give(scheduler, pool)
    runner = AdapterRunner(workers, max_loras, 4)
    ended: Counter[str] = Counter()
    asked, met = {}, Counter()
    number = 0
    while number < 150 or scheduler.has_unfinished_requests():
        for _ in range(draw.randrange(3) if number < 150 else 0):
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
            request = make_request(f"r{number}", prompt, max_tokens=draw.randrange(1, 12))
            request.lora_request = draw.choice([None, *map(lora, range(1, 6))])
            asked[request.request_id] = request.lora_request
            scheduler.add_request(request)
            number += 1
        for output in run_step(scheduler, runner):
            ended[output.request_id] += output.finish_reason is not None
        change = draw.random()
        one = lora(draw.randrange(1, 6), load_inplace=draw.random() < 0.5)
        if change < 0.1:
            met["removed"] += pool.remove(one.lora_int_id)
        elif change < 0.2:
            workers.files[one.lora_path] = f"{one.lora_path} changed at {number}"
            pool.add(one)
        elif change < 0.25 and asked:
            scheduler.abort_requests([draw.choice(list(asked))])
        met["turns"] += len(pool.running_names) == max_loras
        assert workers.most_held <= kept + max_loras + 1
    assert max(ended.values()) == 1 and len(runner.served) > 50 and met["removed"] and met["turns"]
    assert not pool.running_names and not pool.waiting_names
    for adapter_id in pool.loaded_ids():
        pool.remove(adapter_id)
    assert not workers.held and not pool._listed and not pool._loaded


def drain(scheduler, runner):
    order = []
    while scheduler.has_unfinished_requests():
        order += [each.request_id for each in run_step(scheduler, runner) if each.finish_reason]
    return order


def give(scheduler, pool):
    scheduler.use_guests([AdapterTurns(pool, scheduler.requests), *scheduler.guests])
    return pool


def queue(scheduler, name, adapter, max_tokens=1):
    request = make_request(name, [1, 2, 3], max_tokens=max_tokens)
    request.lora_request = adapter
    scheduler.add_request(request)


def test_others_pass_one_that_waits_for_its_turn_but_not_for_ever(workers):
    scheduler = make_scheduler(max_num_seqs=2)
    give(scheduler, make_pool(workers))
    runner = AdapterRunner(workers, 1, 2)
    queue(scheduler, "r0", lora(1), max_tokens=3)
    queue(scheduler, "r1", lora(2))
    for number in range(2, 12):
        queue(scheduler, f"r{number}", lora(1) if number % 2 else None)
    stats = scheduler.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == ((), ("a", "b"))
    order = drain(scheduler, runner)
    assert len(order) == 12
    passed = [name for name in order[: order.index("r1")] if int(name[1:]) % 2]
    assert 1 <= len(passed) <= 3, "as many as the pool's patience"


def test_a_request_whose_adapter_cannot_be_read_again_ends(workers):
    scheduler = make_scheduler()
    pool = give(scheduler, make_pool(workers))
    runner = AdapterRunner(workers, 1, 4)
    pool.add(lora(1))
    queue(scheduler, "r0", lora(1))
    pool.add(lora(2))
    del workers.files["/a"]
    queue(scheduler, "r1", None)
    assert drain(scheduler, runner) == ["r1"]
    (output,) = scheduler.refused
    assert output.request_id == "r0" and output.finish_reason == "error" and "/a: there is no" in output.error
    assert not scheduler.requests and pool.loaded_ids() == {2}


def test_a_prefix_is_not_shared_with_another_adapter_or_another_load(workers):
    def cached(adapter):
        request = make_request("r1", [3, 1, 4, 1] * 4, max_tokens=1)
        request.lora_request = adapter
        scheduler.add_request(request)
        drain(scheduler, runner)
        return request.num_cached_tokens // BLOCK_SIZE

    scheduler = make_scheduler()
    pool = give(scheduler, make_pool(workers, max_cpu_loras=2))
    runner = AdapterRunner(workers, 1, 4)
    assert VOCAB > 4
    assert [cached(each) for each in (None, lora(1), lora(2), None, lora(1), lora(2))] == [0, 0, 0, 3, 3, 3]
    pool.add(lora(1, load_inplace=True))
    assert [cached(lora(1)), cached(lora(1)), cached(lora(2))] == [0, 3, 3]
    pool.remove(2)
    assert [cached(lora(2)), cached(None)] == [0, 3]


def test_a_step_of_an_encoder_has_at_most_as_many_adapters(workers):
    pool = make_pool(workers, max_loras=2)
    scheduler = WholeRequestScheduler(
        SchedulerConfig(max_num_seqs=8), lambda made: (AdapterTurns(pool, made.requests),)
    )
    for number in range(8):
        request = make_request(f"r{number}", [1] * (number + 1))
        request.lora_request = [None, lora(1), lora(2), lora(3)][number % 4]
        scheduler.add_request(request)
    workers.files.pop("/c")
    seen = []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        numbers = [each.lora_int_id for each in (step.parts.of(StepAdapters) or {}).values()]
        assert len(set(numbers)) <= 2 and set(numbers) <= set(workers.held)
        seen.append([new.req_id for new in step.scheduled_new_reqs])
        scheduler.discard_step(step)
    assert seen[0] == ["r0", "r1", "r2", "r4", "r5", "r6"]
    assert [output.request_id for output in scheduler.refused] == ["r3", "r7"]
    assert not pool.running_names and not pool.waiting_names

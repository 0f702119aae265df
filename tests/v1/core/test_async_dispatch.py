"""Steps that begin before the tokens of the step before are known: outputs as without, whatever happens in between."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from core_harness import BLOCK_SIZE, FakeRunner, check_invariants, make_request, make_scheduler
from test_scheduler_properties import Run, assert_reached, random_workload

from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.features.states.memory import NO_STATES


class Fault(Exception):
    pass


class LateResult:
    """A step that the fake device has run, and of which the host knows nothing yet."""

    def __init__(self, worker, output, broken, lost) -> None:
        self.worker, self.output, self.broken, self.lost = worker, output, broken, lost

    def result(self):
        self.worker.flying.remove(self)
        if self.lost is not None:
            self.worker.runner.spoil(self.lost)
            raise Fault
        if self.broken is not None:
            self.worker.spoil(self.broken)
        return self.output


class FakeWorker:
    can_schedule_ahead = True
    weights_version = 0
    weight_version = None
    kv_group_windows = (None,)

    def __init__(self, max_num_seqs: int, seen: Counter) -> None:
        self.runner, self.seen = FakeRunner(max_num_seqs), seen
        self.flying: list[LateResult] = []
        self.fail_next = self.lose_next = False
        self.break_next: int | None = None
        self.scheduler = None

    def begin_step(self, step) -> LateResult:
        assert len(self.flying) < 2
        if self.fail_next:
            self.fail_next = False
            raise Fault
        self.seen["steps ahead"] += bool(self.flying)
        output = self.runner.execute(step)
        broken = lost = None
        if self.lose_next:
            self.lose_next = False
            begun_at = dict(step.begun_at())
            lost = [
                block for req_id in begun_at for block in self.runner.blocks[req_id][begun_at[req_id] // BLOCK_SIZE :]
            ]
        if self.break_next is not None and output.req_ids:
            where = self.break_next % len(output.req_ids)
            broken = output.req_ids[where]
            output = output.without({broken})
            output.errors[broken] = "broken"
            self.break_next = None
        self.flying.append(LateResult(self, output, broken, lost))
        return self.flying[-1]

    def spoil(self, req_id: str) -> None:
        counts, kv = self.scheduler.kv.pool.ref_counts, self.scheduler.kv
        own = kv.blocks_of(req_id)[0] if req_id in kv.owned else ()
        self.runner.spoil(block for block in own if counts[block] == 1)


def make_core(worker: FakeWorker, scheduler, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    executor = SimpleNamespace(
        worker=worker,
        begin_step=lambda step: worker.begin_step(step),
        num_blocks=1,
        num_host_blocks=0,
        state_slots=NO_STATES,
    )
    monkeypatch.setattr("vllm.v1.engine.core.make_executor", lambda *_: executor)
    config = SimpleNamespace(
        scheduler_config=SchedulerConfig(async_scheduling=True),
        cache_config=CacheConfig(),
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(
            reads_images=False, max_model_len=1, attn_type="decoder", runner_type="generate", enable_prompt_embeds=False
        ),
        lora_config=None,
        speculative_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
    )
    core = EngineCore(config)
    core.scheduler = worker.scheduler = scheduler
    return core


class RunAhead(Run):
    """One workload through an engine core whose steps overlap."""

    def __init__(self, options: dict, seen: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(options, seen)
        self.worker = FakeWorker(options["max_num_seqs"], seen)
        self.runner = self.worker.runner
        self.core = make_core(self.worker, self.scheduler, monkeypatch)

    def on_step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_unfinished_requests():
                self._step()

    def _step(self) -> None:
        before = set(self.scheduler.requests)
        preemptions = self.scheduler.num_preemptions
        try:
            self._take(self.core.step())
        except Fault:
            self.seen["failed steps"] += 1
            self.gone |= before - set(self.scheduler.requests)
        self.seen["preemptions"] += self.scheduler.num_preemptions - preemptions
        check_invariants(self.scheduler)

    def on_fail(self) -> None:
        self.worker.fail_next = True
        self._step()

    def on_lose(self) -> None:
        self.worker.lose_next = True
        self.on_step(2)

    def on_break(self, where: int) -> None:
        self.worker.break_next = where
        self.on_step(2)

    def _take(self, step_outputs) -> None:
        super()._take(step_outputs)
        self.gone |= {output.request_id for output in step_outputs if output.finish_reason == "error"}
        self.seen["broken requests"] += sum(output.finish_reason == "error" for output in step_outputs)


def test_every_output_is_as_if_alone(monkeypatch):
    seen: Counter = Counter()
    rng = random.Random(1)
    for _ in range(150):
        options, actions = random_workload(rng)
        actions = [("lose",) if kind == ("reset",) else kind for kind in actions]
        run = RunAhead(options, seen, monkeypatch)
        run.play(actions)
        run.finish()
    events = ("steps ahead", "preemptions", "aborts of running", "aborts of waiting", "broken requests", "failed steps")
    assert_reached(seen, events)


@pytest.fixture
def make_run(monkeypatch):
    def make(**options):
        scheduler = make_scheduler(**options)
        worker = FakeWorker(scheduler.config.max_num_seqs, Counter())
        return make_core(worker, scheduler, monkeypatch), worker

    return make


def tokens_of(core: EngineCore, request_id: str) -> list[int]:
    tokens = []
    for _ in range(100):
        if not core.scheduler.has_request(request_id):
            return tokens
        for output in core.step():
            tokens += output.new_token_ids if output.request_id == request_id else []
    raise AssertionError("the request does not end")


def test_a_request_that_takes_an_id_gets_nothing_of_its_last_owner(make_run):
    core, _ = make_run()
    core.scheduler.add_request(make_request("r1", [1, 2, 3], max_tokens=20))
    core.scheduler.add_request(make_request("r2", [1], max_tokens=20))
    core.step()
    core.abort_requests(["r1"])
    core.scheduler.add_request(make_request("r1", [4, 5], max_tokens=6))
    alone, _ = make_run()
    alone.scheduler.add_request(make_request("r1", [4, 5], max_tokens=6))
    assert tokens_of(core, "r1") == tokens_of(alone, "r1")


def test_no_token_is_drawn_beyond_the_known_limits(make_run):
    core, worker = make_run(max_model_len=12)
    core.scheduler.add_request(make_request("r1", [1] * 4, max_tokens=3))
    core.scheduler.add_request(make_request("r2", [1] * 7, max_tokens=100))
    core.scheduler.add_request(make_request("r3", [1] * 7, max_tokens=0))
    while core.has_unfinished_requests():
        core.step()
        assert all(count <= {"r1": 6, "r2": 11, "r3": 7}[req_id] for req_id, count in worker.runner.computed.items())
    assert worker.seen["steps ahead"]


@pytest.mark.parametrize("params", [{"bad_words": ["x"]}, {"logits_processors": [len]}], ids=str)
def test_what_is_decided_on_the_host_waits_for_the_tokens(make_run, params):
    core, worker = make_run()
    core.scheduler.add_request(make_request("r1", [1, 2], max_tokens=5, **params))
    while core.has_unfinished_requests():
        core.step()
    assert not worker.seen["steps ahead"]


def test_a_block_is_found_once_its_last_token_is_known(make_run):
    core, _ = make_run()
    prompt = [1] * (BLOCK_SIZE - 1)
    core.scheduler.add_request(make_request("r1", prompt, max_tokens=BLOCK_SIZE + 2))
    generated = tokens_of(core, "r1")
    kv = core.scheduler.kv
    again = make_request("r2", prompt + generated, max_tokens=1)
    found = kv.find_prefix(again)
    assert found.num_blocks == 2


def test_nothing_is_lost_when_the_step_ahead_fails(make_run):
    core, worker = make_run(max_num_seqs=2)
    core.scheduler.add_request(make_request("r1", [1, 2], max_tokens=1))
    core.scheduler.add_request(make_request("r2", [1, 2], max_tokens=9))
    worker.fail_next = False
    begin = worker.begin_step

    def fail_second(step):
        worker.fail_next = bool(worker.flying)
        return begin(step)

    worker.begin_step = fail_second
    with pytest.raises(Fault):
        core.step()
    worker.begin_step = begin
    assert [output.request_id for output in core.step()] == ["r1"]
    assert not core.has_unfinished_requests()
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    np.testing.assert_equal(len(worker.flying), not core.steps.are_done)


def test_content_of_an_aborted_request_whose_step_failed_is_not_found(make_run):
    core, worker = make_run()
    core.scheduler.add_request(make_request("r1", [1, 2], max_tokens=40))
    core.step()
    prompt = [3] * (2 * BLOCK_SIZE + 1)
    core.scheduler.add_request(make_request("r2", prompt, max_tokens=4))
    worker.lose_next = True
    core.step()
    core.abort_requests(["r2"])
    with pytest.raises(Fault):
        core.step()
    assert not core.scheduler.kv.find_prefix(make_request("r3", prompt)).num_blocks


def test_a_step_that_fails_while_the_engine_settles_ends_its_requests(make_run):
    core, worker = make_run()
    core.scheduler.add_request(make_request("r1", [1, 2], max_tokens=40))
    core.step()
    worker.lose_next = True
    core.step()
    assert not core.steps.are_done
    with pytest.raises(Fault):
        core.reset_prefix_cache(reset_running_requests=True)
    assert core.steps.are_done and not core.has_unfinished_requests()
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks

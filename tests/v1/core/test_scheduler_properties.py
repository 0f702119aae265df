"""Random arrivals, aborts, failures, preemptions: invariants after every step, every output as if alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from core_harness import FakeRunner, check_invariants, expected_output, make_request, make_scheduler, run_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.features.drafts.scheduler import NextDrafts

prompts = st.one_of(
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
    # Shared beginnings, so that blocks are found by content; whole blocks, so that all of a prompt may be.
    st.builds(lambda shared, tail: [1] * shared + tail, st.integers(4, 20), st.lists(st.integers(0, 2), max_size=6)),
    st.builds(lambda blocks: [2] * 4 * blocks, st.integers(1, 5)),
)
arrivals = st.tuples(
    st.just("add"),
    prompts,
    st.one_of(st.integers(0, 6), st.integers(12, 30)),
    st.integers(-2, 2),
    st.sampled_from([(), (3,)]),
    st.sampled_from([None, None, None, "salt"]),
    st.sampled_from([None, None, 0, 3, 8]),
)
others = st.one_of(
    arrivals,
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("fail")),
    st.tuples(st.just("break"), st.integers(0, 30)),
    st.tuples(st.just("reset")),
)
# Bursts first: requests that run together are what makes blocks scarce, and later ones of a higher priority
# take the place of those that had their turn.
workloads = st.builds(
    lambda first, count, second, rest: [*first, ("step", count), *second, *rest],
    st.lists(arrivals, min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(arrivals, min_size=2, max_size=4),
    st.lists(others, min_size=4, max_size=20),
)
settings_of_scheduler = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([12, 12, 13, 14, 18, 30]),
        "max_num_seqs": st.sampled_from([1, 2, 3, 4, 5, 6]),
        "budget": st.one_of(st.integers(1, 10), st.integers(10, 60)),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "caching": st.sampled_from([True, True, False]),
        "chunked": st.sampled_from([True, True, False]),
        "idle": st.sampled_from([None, None, 0, 8, 20]),
        "host_blocks": st.sampled_from([0, 2, 9, 40]),
    }
)


class Run:
    """One workload through one scheduler. `seen` counts what happened."""

    def __init__(self, options: dict, seen: Counter, drafts: random.Random | None = None) -> None:
        if not options["chunked"]:
            options = {**options, "budget": 48}
        self.scheduler = make_scheduler(**options)
        self.runner = FakeRunner(options["max_num_seqs"], drafts)
        self.seen = seen
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_rows: dict[str, int] = {}  # prompt positions that are still to be read
        self.finished: set[str] = set()
        self.gone: set[str] = set()

    def play(self, actions) -> None:
        for kind, *arguments in actions:
            if kind in ("add", "abort", "reset") or self.scheduler.has_unfinished_requests():
                getattr(self, "on_" + kind)(*arguments)
            check_invariants(self.scheduler)

    def on_add(self, prompt, max_tokens, priority, eos, salt, start) -> None:
        request_id = f"r{len(self.expected)}"
        reads = {} if start is None else {"prompt_logprobs": 0, "prompt_logprob_start": start}
        self.scheduler.add_request(make_request(request_id, prompt, max_tokens, priority, eos, salt, **reads))
        self.num_rows[request_id] = 0 if start is None else max(len(prompt) - 1 - start, 0)
        self.runner.salts[request_id] = salt
        self.expected[request_id] = expected_output(prompt, max_tokens, self.scheduler.max_model_len, eos)
        self.outputs[request_id] = []

    def on_step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_unfinished_requests():
                self._take(run_step(self.scheduler, self.runner, self.seen))

    def on_abort(self, number: int) -> None:
        request_id = f"r{number}"
        if self.scheduler.has_request(request_id):
            self.gone.add(request_id)
            running = any(request.request_id == request_id for request in self.scheduler.running)
            self.seen["aborts of running" if running else "aborts of waiting"] += 1
        self.scheduler.abort_requests([request_id, request_id])

    def on_fail(self) -> None:
        """The step does not happen."""
        step = self.scheduler.schedule()
        self.seen["failed steps with preemptions"] += bool(step.preempted_req_ids)
        self.gone.update(self.scheduler.discard_step(step))

    def on_break(self, where: int) -> None:
        """The runner finds fault with one request of the step; its neighbours must not notice."""
        step = self.scheduler.schedule()
        result = self.runner.execute(step)
        if result.req_ids:
            where %= len(result.req_ids)
            broken = result.req_ids.pop(where)
            result.prompt_logprobs.pop(broken, None)
            result.sampled_token_ids = np.delete(result.sampled_token_ids, where)
            result.logprobs.pop(where)
            result.errors[broken] = "broken"
            for table in (result.following, result.parts[NextDrafts]):
                table.pop(broken, None)
            self.gone.add(broken)
            counts = self.scheduler.kv.pool.ref_counts
            self.runner.spoil(block for block in self.runner.blocks[broken] if counts[block] == 1)
            self.seen["broken requests"] += 1
        self._take(self.scheduler.update_from_output(step, result))

    def on_reset(self) -> None:
        assert self.scheduler.reset_prefix_cache() == (not self.scheduler.running)

    def finish(self) -> None:
        """Run dry and compare."""
        self.on_step(3000)
        assert not self.scheduler.has_unfinished_requests(), "starved"
        assert self.finished | self.gone == set(self.expected)
        for request_id in self.finished - self.gone:
            assert self.outputs[request_id] == self.expected[request_id]
            assert self.num_rows[request_id] == 0, "a prompt position was not read, or was read twice"
        for request_id in self.gone:
            got = self.outputs[request_id]
            assert got == self.expected[request_id][: len(got)]
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks
        self.runner.execute(self.scheduler.schedule())
        assert not self.runner.tokens, "slots were not freed"
        self.seen["rows of cached prefixes"] += self.runner.num_cached_rows

    def _take(self, step_outputs) -> None:
        for output in step_outputs:
            self.outputs[output.request_id] += output.new_token_ids
            for rows in output.prompt_logprobs or ():
                self.num_rows[output.request_id] -= rows.rows.stop - rows.rows.start
            if output.finish_reason in ("stop", "length"):
                self.finished.add(output.request_id)


def assert_reached(seen: Counter, events: tuple[str, ...], least: int = 20) -> None:
    """Examples that never get to the hard cases prove nothing."""
    for event in events:
        assert seen[event] >= least, f"{event}: {seen[event]} ({dict(seen)})"


def test_nothing_leaks_and_every_output_is_as_if_alone():
    seen: Counter = Counter()

    @settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(settings_of_scheduler, workloads)
    def play(options, actions):
        run = Run(options, seen)
        run.play(actions)
        run.finish()

    play()
    assert_reached(
        seen,
        ("preemptions", "prefix hits", "evictions", "aborts of running", "broken requests", "rows of cached prefixes"),
    )


def random_workload(rng: random.Random) -> tuple[dict, list[tuple]]:
    """Longer than hypothesis likes them, under constant pressure."""
    options = {
        "num_blocks": rng.choice([12, 12, 14, 20]),
        "max_num_seqs": rng.randint(2, 6),
        "budget": rng.choice([3, 9, 17, 40]),
        "policy": rng.choice(["fcfs", "priority"]),
        "caching": rng.random() < 0.8,
        "chunked": rng.random() < 0.8,
        "idle": rng.choice([None, None, 0, 8, 20]),
        "host_blocks": rng.choice([0, 2, 9, 40]),
    }
    actions: list[tuple] = []
    for number in range(12):
        prompt = [1] * rng.choice([0, 4, 8, 12]) + rng.choices(range(3), k=rng.randint(1, 8))
        eos = rng.choice([(), (), (3,)])
        salt = rng.choice([None, None, None, "salt"])
        start = rng.choice([None, None, 0, 5])
        actions.append(("add", prompt, rng.randint(0, 30), rng.randint(-2, 2), eos, salt, start))
        actions += rng.choices(
            [
                ("step", 1),
                ("step", 5),
                ("abort", rng.randint(0, number)),
                ("fail",),
                ("break", 3),
                ("reset",),
            ],
            weights=[8, 8, 2, 2, 2, 1],
            k=rng.randint(0, 3),
        )
    return options, actions


def test_the_same_under_constant_pressure():
    seen: Counter = Counter()
    rng = random.Random(0)
    for _ in range(300):
        options, actions = random_workload(rng)
        run = Run(options, seen)
        run.play(actions)
        run.finish()
    assert_reached(
        seen,
        (
            "preemptions",
            "preemptions of scheduled requests",
            "resumed with cached blocks",
            "shared within a step",
            "evictions",
            "split prompts",
            "aborts of running",
            "aborts of waiting",
            "broken requests",
            "rows of cached prefixes",
            "copied parts",
            "parts shared within a step",
            "copies of what is given up",
            "swapped out",
            "swapped in",
            "resumed from the host",
        ),
    )
    assert_reached(seen, ("failed steps with preemptions",), least=5)


def test_the_same_with_drafts():
    seen: Counter = Counter()
    rng = random.Random(1)
    for _ in range(200):
        options, actions = random_workload(rng)
        run = Run(options, seen, drafts=rng)
        run.play(actions)
        run.finish()
        stats = run.scheduler.stats()
        seen["right drafts"] += stats.num_accepted_tokens
        seen["wrong drafts"] += stats.num_draft_tokens - stats.num_accepted_tokens
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert_reached(
        seen,
        (
            "preemptions",
            "resumed with cached blocks",
            "evictions",
            "aborts of running",
            "broken requests",
            "drafts over a border",
            "right drafts",
            "wrong drafts",
        ),
    )

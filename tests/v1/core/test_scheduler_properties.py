"""Random arrivals, aborts, failures and preemptions: every invariant after every step, every output as if alone."""

from __future__ import annotations

import numpy as np
from core_harness import FakeRunner, check_invariants, expected_output, make_request, make_scheduler, run_step
from hypothesis import given, settings
from hypothesis import strategies as st

prompts = st.one_of(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    # Shared beginnings, so that blocks are found by content.
    st.builds(
        lambda shared, tail: [1] * shared + tail, st.integers(4, 20), st.lists(st.integers(0, 2), max_size=6)
    ),
)
arrivals = st.tuples(
    st.just("add"), prompts, st.integers(1, 12), st.integers(-2, 2), st.sampled_from([(), (3,)]),
    st.sampled_from([None, "salt"]),
)  # fmt: skip
actions = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("break"), st.integers(0, 30)),
        st.tuples(st.just("reset")),
    ),
    max_size=40,
)
settings_of_scheduler = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(12, 30),
        "max_num_seqs": st.integers(1, 5),
        "budget": st.integers(1, 24),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "caching": st.booleans(),
    }
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(settings_of_scheduler, actions, st.booleans())
def test_nothing_leaks_and_every_output_is_as_if_alone(options, actions, whole_prompts):
    if whole_prompts:
        options = {**options, "chunked": False, "budget": 48}
    scheduler = make_scheduler(**options)
    runner = FakeRunner(options["max_num_seqs"])
    expected: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    finished: set[str] = set()
    gone: set[str] = set()

    def take(step_outputs):
        for output in step_outputs:
            outputs[output.request_id] += output.new_token_ids
            if output.finish_reason in ("stop", "length"):
                finished.add(output.request_id)

    for action in actions:
        kind = action[0]
        if kind == "add":
            _, prompt, max_tokens, priority, eos, salt = action
            request_id = f"r{len(expected)}"
            scheduler.add_request(make_request(request_id, prompt, max_tokens, priority, eos, salt))
            expected[request_id] = expected_output(prompt, max_tokens, scheduler.max_model_len, eos)
            outputs[request_id] = []
        elif kind == "step" and scheduler.has_unfinished_requests():
            take(run_step(scheduler, runner))
        elif kind == "abort":
            request_id = f"r{action[1]}"
            if scheduler.has_request(request_id):
                gone.add(request_id)
            scheduler.abort_requests([request_id, request_id])
        elif kind == "fail" and scheduler.has_unfinished_requests():
            gone.update(scheduler.discard_step(scheduler.schedule()))
        elif kind == "break" and scheduler.has_unfinished_requests():
            # The runner finds fault with one request of the step; its neighbours must not notice.
            step = scheduler.schedule()
            result = runner.execute(step)
            if result.req_ids:
                where = action[1] % len(result.req_ids)
                broken = result.req_ids.pop(where)
                result.sampled_token_ids = np.delete(result.sampled_token_ids, where)
                result.logprobs.pop(where)
                result.errors[broken] = "broken"
                gone.add(broken)
            take(scheduler.update_from_output(step, result))
        elif kind == "reset":
            assert scheduler.reset_prefix_cache() == (not scheduler.running)
        check_invariants(scheduler)

    for _ in range(3000):
        if not scheduler.has_unfinished_requests():
            break
        take(run_step(scheduler, runner))
    assert not scheduler.has_unfinished_requests(), "starved"
    assert finished | gone == set(expected)
    for request_id in finished - gone:
        assert outputs[request_id] == expected[request_id]
    for request_id in gone:
        assert outputs[request_id] == expected[request_id][: len(outputs[request_id])]
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    runner.execute(scheduler.schedule())
    assert not runner.tokens, "slots were not freed"

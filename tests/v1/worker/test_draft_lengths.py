"""When drafts are made: where they pay, and again after a time where they did not."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.config import SpeculativeConfig
from vllm.v1.features.drafts.draft_lengths import DraftLengths

MOST = 8


def make(num_slots=1, token_cost=0.0, **options):
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST, **options)
    lengths = DraftLengths(config, num_slots, token_cost=token_cost)
    for slot in range(num_slots):
        lengths.add_request(slot)
    return lengths


def run(lengths, right, num_steps, slots=(0,), room=MOST, found=lambda slot: MOST):
    """The numbers of tokens drafted in each step, of which the first `right` (by slot) are right. The drafter finds at
    most `found` (by slot)."""
    slots, steps = np.array(slots), []
    for _ in range(num_steps):
        drafted, may_be_too_short = lengths.wanted(slots, np.full(len(slots), room, dtype=np.int32))
        drafted = np.minimum(drafted, [found(slot) for slot in slots.tolist()])
        if may_be_too_short and not lengths.are_worth_it(slots, drafted):
            drafted = np.zeros_like(drafted)
        steps.append(drafted.tolist())
        rows = np.flatnonzero(drafted)
        if len(rows):
            accepted = np.minimum(drafted, [right(slot) for slot in slots.tolist()])[rows]
            lengths.observe(slots[rows], drafted[rows].astype(np.int32), accepted.astype(np.int32))
    return np.array(steps)


def test_drafts_grow_while_they_are_right():
    steps = run(make(), lambda slot: MOST, 12)[:, 0]
    assert 0 < steps[0] < MOST
    assert (np.diff(steps) >= 0).all()
    assert steps[-1] == MOST


def test_drafts_stop_while_they_are_wrong_and_are_tried_again():
    steps = run(make(), lambda slot: 0, 600)[:, 0]
    assert steps[:3].all()
    late = steps[200:]
    assert 0 < np.count_nonzero(late) <= len(late) / 50
    assert late.max() <= 2


def test_what_drafting_costs_counts():
    coin = np.random.RandomState(0).randint(0, 2, 1000)
    steps = []
    for cost in (0, 0.3, 1.5):
        outcomes = iter(coin.tolist())
        steps.append(run(make(token_cost=cost), lambda slot, outcomes=outcomes: next(outcomes), 100).mean())
    assert steps[0] > 1.5 * steps[1]
    assert steps[2] < 0.3


def test_a_text_that_begins_to_copy_is_noticed():
    lengths = make()
    run(lengths, lambda slot: 0, 300)
    steps = run(lengths, lambda slot: MOST, 90)[:, 0]
    assert (steps[-10:] == MOST).all()


def test_a_text_that_copies_now_and_then():
    # Half of the drafts are wrong from their first token on, the others right: with one request, that pays.
    lengths = make()
    coin = iter(np.random.RandomState(0).randint(0, 2, 1000).tolist())
    steps = run(lengths, lambda slot: MOST * next(coin), 200)[:, 0]
    assert np.count_nonzero(steps) > 150


@pytest.mark.parametrize("num_slots", [16, 64])
def test_rows_of_a_large_batch_have_to_be_worth_more(num_slots):
    middling = lambda slot: 1  # noqa: E731
    alone = run(make(), middling, 100).mean()
    many = run(make(num_slots), middling, 100, range(num_slots)).mean()
    assert alone > 1.5
    assert many <= 1.5


def test_a_large_batch_whose_drafts_are_wrong_is_left_alone():
    steps = run(make(16), lambda slot: 0, 640, range(16))
    rows = 16 + steps.sum(axis=1)
    # By the model of costs: of a step with 8 rows, reading the weights and computing take as long.
    assert (np.hypot(8, rows) / np.hypot(8, 16)).mean() < 1.02


def test_a_batch_that_copies_drafts():
    steps = run(make(6), lambda slot: MOST, 100, range(6))
    assert (steps[-20:] == MOST).all()


def test_a_batch_that_copies_but_is_bound_by_its_rows_is_left_alone():
    assert run(make(32), lambda slot: MOST, 100, range(32)).max() == 0


def test_each_request_by_itself():
    lengths = make(2)
    steps = run(lengths, lambda slot: MOST * slot, 100, (0, 1))
    assert (steps[-20:, 1] == MOST).all()
    assert np.count_nonzero(steps[-40:, 0]) <= 2


def test_a_slots_next_request_begins_anew():
    lengths = make()
    run(lengths, lambda slot: 0, 100)
    lengths.add_request(0)
    assert run(lengths, lambda slot: 0, 1)[0, 0] > 0


def test_room_and_batch_sizes_are_kept():
    lengths = make(4, disable_by_batch_size=4, num_speculative_tokens_per_batch_size=[(3, 3, 2)])
    right = lambda slot: MOST  # noqa: E731
    assert run(lengths, right, 20)[-1, 0] == MOST
    assert run(lengths, right, 20, room=5).max() == 5
    assert run(lengths, right, 20, (0, 1, 2)).max() == 2
    assert run(lengths, right, 20, (0, 1, 2, 3)).max() == 0


def test_a_lone_draft_in_a_large_batch_is_dropped():
    lengths = make(32)
    run(lengths, lambda slot: MOST, 60, range(32))
    for found in (lambda slot: 0, lambda slot: int(slot == 3)):
        assert run(lengths, lambda slot: MOST, 1, range(32), found=found).max() == 0


def test_the_same_history_gives_the_same_drafts():
    runs = []
    for _ in range(2):
        outcomes = np.random.RandomState(3)
        runs.append(run(make(5), lambda slot, outcomes=outcomes: outcomes.randint(0, 5), 300, range(5)))
    assert (runs[0] == runs[1]).all()

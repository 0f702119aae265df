"""Columns that are kept between steps are those that would be filled anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.logprob import Columns, FilledColumns, LogprobTokenIdsState, fill_columns
from vllm.v1.worker.gpu.sample.states import SamplingStates

LOGITS = torch.zeros(3, 100)


@pytest.fixture
def state() -> LogprobTokenIdsState:
    state = LogprobTokenIdsState(8, torch.device("cpu"))
    for slot, ids in enumerate([[5, 6, 7], [], [9], [8, 4], [5, 6, 7]]):
        add(state, slot, ids)
    return state


def add(state: LogprobTokenIdsState, slot: int, ids: list[int]) -> None:
    state.add_request(slot, SamplingParams(logprob_token_ids=ids or None))


def sampling_states(num_topk: int = 0) -> SamplingStates:
    """States every slot of which has this top-k."""
    states = SamplingStates(8, 100, torch.device("cpu"), 0)
    set_topk(states, range(8), num_topk)
    return states


def set_topk(states: SamplingStates, slots: Iterable[int], num_topk: int) -> None:
    for slot in slots:
        states.add_request(slot, SamplingParams(logprobs=num_topk), "r")


def check(columns: Columns, state: LogprobTokenIdsState, num_topk: int, slots: list[int]) -> None:
    rows = np.array(slots)
    assert columns.num_topk == num_topk
    expected = fill_columns(LOGITS, num_topk, state, torch.from_numpy(rows), state.max_num_token_ids(rows))
    first = 1 + num_topk
    assert torch.equal(columns.table[:, first:], expected.table[:, first:])
    for one, other in ((columns.num_valid, expected.num_valid), (columns.num_token_ids, expected.num_token_ids)):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))


def test_they_follow_slots_top_k_and_what_slots_ask(state: LogprobTokenIdsState) -> None:
    sampling = sampling_states()
    filled = FilledColumns(state, sampling)

    def ask(num_topk: int, slots: list[int]) -> None:
        set_topk(sampling, slots[:-1], num_topk // 2)
        set_topk(sampling, slots[-1:], num_topk)
        for _ in range(2):
            columns = filled.of(LOGITS, np.array(slots))
            check(columns, state, num_topk, slots)

    for slots in ([0, 1, 2], [2, 1, 0], [3, 3, 4], [1, 1, 1]):
        for num_topk in (0, 2):
            ask(num_topk, slots)
    state.remove_request(0)
    ask(0, [0, 1, 2])
    add(state, 0, [3, 1, 2, 5])
    ask(0, [0, 1, 2])
    # As the one before it: nothing changes.
    add(state, 0, [3, 1, 2, 5])
    add(state, 2, [])
    ask(0, [0, 1, 2])
    add(state, 2, list(range(60)))
    ask(1, [0, 1, 2])


def test_they_are_filled_once_and_few_are_kept(state: LogprobTokenIdsState, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args):
        calls.append(args)
        return fill_columns(*args)

    monkeypatch.setattr(logprob, "fill_columns", counted)
    sampling = sampling_states()
    filled = FilledColumns(state, sampling)
    for _ in range(3):
        filled.of(LOGITS, np.array([0, 1, 2]))
        # As the one before it: nothing changes.
        set_topk(sampling, range(3), 0)
    assert len(calls) == 1
    for slots in itertools.islice(itertools.permutations(range(8), 3), 1, 40):
        filled.of(LOGITS, np.array(slots))
        assert len(filled._filled) <= 8
    assert len(calls) == 40
    for _ in range(2):
        # Too large to be kept.
        filled.of(torch.zeros(30000, 100), np.zeros(30000, np.int64))
    assert len(calls) == 42

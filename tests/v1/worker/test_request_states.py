"""Tokens that have a place before they are known."""

from __future__ import annotations

import numpy as np
import torch

from vllm.v1.worker.gpu.states import UNKNOWN, RequestStates


def make_states() -> RequestStates:
    return RequestStates(3, 10, torch.device("cpu"), async_scheduling=True)


def test_a_reserved_token_counts_and_comes_from_the_device():
    states = make_states()
    slots = np.array([states.add_request("a", [5, 6], 2, 0), states.add_request("b", [7], 1, 0)])
    states.keep_sampled(torch.from_numpy(slots), torch.tensor([8, 9], dtype=torch.int32))
    places = states.reserve(slots)
    assert states.total_len[slots].tolist() == [3, 2]
    assert states.token_ids[slots, [2, 1]].tolist() == [UNKNOWN, UNKNOWN]
    assert states.token_ids_tensor(slots)[0].tolist() == [5, 6, 8]
    assert states.token_ids_tensor(slots)[1, :2].tolist() == [7, 9]
    states.fill(places, np.array([8, 9], dtype=np.int32))
    assert states.token_ids[slots, [2, 1]].tolist() == [8, 9]


def test_a_request_that_left_leaves_its_slot_to_the_next():
    states = make_states()
    slot = states.add_request("a", [5, 6], 2, 0)
    places = states.reserve(np.array([slot]))
    states.remove_request("a")
    assert states.add_request("a", [1, 2, 3, 4], 4, 0) == slot
    states.fill(places, np.array([9], dtype=np.int32))
    assert states.token_ids[slot, :4].tolist() == [1, 2, 3, 4]

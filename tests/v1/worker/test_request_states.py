"""Tokens that have a place before they are known; histories and block tables on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretend_cuda import pretending

from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample import penalties
from vllm.v1.worker.gpu.states import UNKNOWN, BlockTables, Places, RequestStates


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


def test_the_device_has_the_history_and_is_sent_what_is_new(monkeypatch: pytest.MonkeyPatch):
    """Requests come and go, are preempted, and sample tokens that the host does not know yet."""
    rng, sent = np.random.default_rng(0), []
    upload_all = penalties.upload_all
    monkeypatch.setattr(
        penalties, "upload_all", lambda arrays, device: sent.append(len(arrays[0])) or upload_all(arrays, device)
    )
    states = RequestStates(6, 60, torch.device("cpu"), async_scheduling=True)
    history = penalties.TokenHistory(6, states.device)
    in_flight: tuple[Places, np.ndarray] | None = None
    for step in range(120):
        if len(states.req_id_to_slot) < 6 and rng.random() < 0.4:
            count = int(rng.integers(1, 30))
            states.add_request(f"{step}", rng.integers(0, 99, count).tolist(), count, 0)
        slots = rng.permutation(list(states.req_id_to_slot.values()))[: int(rng.integers(1, 7))]
        if not len(slots):
            continue
        width = states.total_len[slots].max()
        before = len(sent)
        got, wanted = history.rows(slots, states), states.token_ids_tensor(slots)
        assert got.shape == (len(slots), width)
        for row, length in enumerate(states.total_len[slots]):
            assert got[row, :length].tolist() == wanted[row, :length].tolist()
        history.rows(slots, states)
        assert len(sent) <= before + 1, "all is there already"
        if in_flight is not None:
            states.fill(*in_flight)
        drawn = rng.integers(0, 99, len(slots)).astype(np.int32)
        states.keep_sampled(torch.from_numpy(slots), torch.from_numpy(drawn))
        in_flight = states.reserve(slots), drawn
        for req_id, slot in list(states.req_id_to_slot.items()):
            if states.total_len[slot] > 50 or rng.random() < 0.05:
                states.remove_request(req_id)
    assert 2 * sum(sent) < 120 * 6 * 25, "not whole histories each step"


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended where there is no device")
def test_block_tables_on_the_device_are_those_of_the_host():
    rng = np.random.default_rng(1)
    with pretending():
        device = torch.device("cuda", 0)
        tables, block_id = BlockTables(4, 100, 8, device), 0
        for _ in range(30):
            for slot in range(4):
                added = list(range(block_id, block_id + int(rng.integers(0, 4))))
                block_id += len(added)
                if tables.num_blocks[slot] + len(added) > 12 or rng.random() < 0.2:
                    tables.set_row(slot, added[:1])
                else:
                    tables.append(slot, added)
            tables.apply_staged_writes()
            slots = rng.permutation(4)
            rows = tables.rows(upload(slots, device), 96).cpu()
            for row, slot in enumerate(slots):
                count = tables.num_blocks[slot]
                assert rows[row, :count].tolist() == tables.table[slot, :count].tolist()

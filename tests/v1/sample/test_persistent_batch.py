"""The batch without gaps that is derived from slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mirror import Entry, follow

from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.sample.logits_processor.state import PersistentBatch
from vllm.v1.worker.gpu.states import RequestStates

MAX_NUM_REQS = 8
ONE_WAY = MoveDirectionality.UNIDIRECTIONAL


class Slots:
    """Slots and the batch over them, driven by request names."""

    def __init__(self) -> None:
        self.states = RequestStates(MAX_NUM_REQS, 64, torch.device("cpu"))
        self.batch = PersistentBatch()
        self.params: dict[str, SamplingParams] = {}

    def add(self, name, prompt=(1, 2), generated=()):
        slot = self.states.add_request(name, [*prompt, *generated], len(prompt), 0)
        self.params[name] = SamplingParams(extra_args={"name": name})
        self.batch.add_request(slot, self.params[name])

    def remove(self, name):
        self.batch.remove_request(self.states.remove_request(name))

    def slots(self, names):
        return np.array([self.states.req_id_to_slot[name] for name in names], dtype=np.int64)

    def step(self, *names, tokens=None):
        """The update of a step in which these sample; afterwards each has one more token."""
        update = self.batch.update(self.slots(names), self.states)
        sampled = np.arange(len(names)) if tokens is None else np.array(tokens)
        self.states.append_sampled(self.slots(names), sampled)
        return update

    def names(self):
        """Request at each index."""
        found = {int(self.batch.indices(self.slots([name]))[0]): name for name in self.params if self.joined(name)}
        return [found[index] for index in range(len(self.batch))]

    def joined(self, name):
        slot = self.states.req_id_to_slot.get(name)
        return slot is not None and slot in self.batch._index_of_slot


def shape(update):
    """An update's effects, with names in place of parameters and ids."""
    added = [(index, params.extra_args["name"]) for index, params, _, _ in update.added]
    return update.batch_size, list(update.removed), added, list(update.moved)


def test_requests_join_when_they_first_sample():
    slots = Slots()
    for name in "abc":
        slots.add(name)
    assert shape(slots.step("b", "a")) == (2, [], [(0, "b"), (1, "a")], [])
    assert slots.step("a", "b") is None
    assert shape(slots.step("c")) == (3, [], [(2, "c")], [])
    assert slots.step("a", "c") is None
    assert slots.names() == ["b", "a", "c"]


def test_new_requests_take_the_lowest_freed_indices():
    slots = Slots()
    for name in "abcde":
        slots.add(name)
    slots.step(*"abcde")
    for name in "dbe":
        slots.remove(name)
    for name in "fg":
        slots.add(name)
    assert shape(slots.step(*"acfg")) == (4, [4], [(1, "f"), (3, "g")], [])
    assert slots.names() == list("afcg")


def test_holes_are_filled_from_the_end():
    slots = Slots()
    for name in "abcdef":
        slots.add(name)
    slots.step(*"abcdef")
    for name in "ace":
        slots.remove(name)
    assert shape(slots.step(*"bdf")) == (3, [0, 2, 4], [], [(5, 0, ONE_WAY), (3, 2, ONE_WAY)])
    assert slots.names() == list("fbd")


@pytest.mark.parametrize(
    ("gone", "new", "removed", "moved"),
    [
        ("c", "", [2], []),
        ("bc", "", [1, 2], []),
        ("a", "", [0], [(2, 0, ONE_WAY)]),
        ("ab", "x", [1], [(2, 1, ONE_WAY)]),
        ("abc", "x", [1, 2], []),
        ("a", "xy", [], []),
    ],
)
def test_what_is_left_open_closes(gone, new, removed, moved):
    slots = Slots()
    for name in "abc":
        slots.add(name)
    slots.step(*"abc")
    for name in gone:
        slots.remove(name)
    for name in new:
        slots.add(name)
    rest = [name for name in "abc" if name not in gone] + list(new)
    update = slots.step(*rest)
    assert (list(update.removed), list(update.moved)) == (removed, moved)
    assert update.batch_size == len(rest) == len(slots.batch)


def test_a_request_that_never_sampled_leaves_no_trace():
    slots = Slots()
    slots.add("a")
    slots.add("b")
    slots.step("a")
    slots.remove("b")
    slots.add("c")  # in b's slot
    assert shape(slots.step("a", "c")) == (2, [], [(1, "c")], [])


def test_output_lists_grow_and_stay_the_same_object():
    slots = Slots()
    slots.add("a", prompt=(5, 6, 7))
    ((_, _, prompt, output),) = slots.step("a", tokens=[11]).added
    assert (prompt, output) == ([5, 6, 7], [])
    slots.step("a", tokens=[12])
    assert output == [11]
    slots.add("b", prompt=(9,))
    slots.step("b")
    assert output == [11, 12], "also in a step in which it does not sample"
    assert all(type(token) is int for token in output)


def test_a_request_that_comes_back_brings_its_output():
    slots = Slots()
    slots.add("a", prompt=(5, 6))
    ((_, _, _, first),) = slots.step("a", tokens=[11]).added
    slots.remove("a")
    slots.add("b")
    slots.step("b")
    slots.add("a", prompt=(5, 6), generated=(11, 12))
    ((index, _, prompt, output),) = slots.step("a", "b").added
    assert (index, prompt, output) == (1, [5, 6], [11, 12])
    assert first == []


def test_restart_adds_every_live_request_anew():
    slots = Slots()
    for name in "abc":
        slots.add(name)
    slots.step("a", "b", tokens=[4, 5])
    slots.batch.restart()
    assert len(slots.batch) == 0
    slots.remove("a")
    assert shape(slots.step("c", "b")) == (2, [], [(0, "c"), (1, "b")], [])


def test_a_mirror_agrees_through_random_histories():
    rng = np.random.default_rng(0)
    for _ in range(60):
        slots, mirror, outputs, number = Slots(), {}, {}, 0
        for _ in range(40):
            alive = list(slots.states.req_id_to_slot)
            for name in alive:
                if rng.random() < 0.15:
                    slots.remove(name)
            while len(slots.states.req_id_to_slot) < MAX_NUM_REQS and rng.random() < 0.4:
                name = f"r{number}"
                number += 1
                outputs[name] = rng.integers(0, 99, rng.integers(0, 3)).tolist()
                slots.add(name, prompt=[number], generated=outputs[name])
            sampling = [name for name in slots.states.req_id_to_slot if rng.random() < 0.7]
            if not sampling:
                continue
            rng.shuffle(sampling)
            tokens = rng.integers(0, 99, len(sampling)).tolist()
            follow(mirror, slots.step(*sampling, tokens=tokens))
            expected = {
                index: Entry(slots.params[name], [int(name[1:]) + 1], outputs[name])
                for index, name in enumerate(slots.names())
            }
            assert mirror == expected
            assert set(sampling) <= set(slots.names())
            for name, token in zip(sampling, tokens, strict=True):
                outputs[name] = [*outputs[name], token]

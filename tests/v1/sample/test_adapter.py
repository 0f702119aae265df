"""The adapter for processors of single requests, and the dict that follows batch updates."""

from __future__ import annotations

import functools

import pytest
import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    MoveDirectionality,
    RequestProcessorsFailed,
    process_dict_updates,
)

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
VOCAB = 5


def update(size, removed=(), added=(), moved=()):
    return BatchUpdate(size, removed, added, moved)


def with_name(name):
    return SamplingParams(extra_args={"name": name})


class TestProcessDictUpdates:
    def run(self, entries, removed=(), added=(), moved=()):
        rows = [(index, with_name(name), None, []) for index, name in added]
        changed = process_dict_updates(entries, update(9, removed, rows, moved), self.state_of)
        return changed, entries

    @staticmethod
    def state_of(params, prompt_ids, output_ids):
        return params.extra_args["name"]

    def test_nothing_new(self):
        assert process_dict_updates({1: "a"}, None, self.state_of) is False

    @pytest.mark.parametrize(
        ("changes", "changed", "expected"),
        [
            ({"removed": [1]}, True, {0: "a", 4: "e"}),
            ({"removed": [2]}, False, {0: "a", 1: "b", 4: "e"}),
            ({"added": [(2, "c")]}, True, {0: "a", 1: "b", 2: "c", 4: "e"}),
            ({"added": [(1, "x")]}, True, {0: "a", 1: "x", 4: "e"}),
            ({"added": [(1, None)]}, True, {0: "a", 4: "e"}),
            ({"added": [(2, None)]}, False, {0: "a", 1: "b", 4: "e"}),
            ({"moved": [(4, 2, ONE_WAY)]}, True, {0: "a", 1: "b", 2: "e"}),
            ({"moved": [(4, 1, ONE_WAY)]}, True, {0: "a", 1: "e"}),
            ({"moved": [(3, 1, ONE_WAY)]}, True, {0: "a", 4: "e"}),
            ({"moved": [(3, 2, ONE_WAY)]}, False, {0: "a", 1: "b", 4: "e"}),
            ({"moved": [(0, 1, SWAP)]}, True, {0: "b", 1: "a", 4: "e"}),
            ({"moved": [(0, 2, SWAP)]}, True, {2: "a", 1: "b", 4: "e"}),
            ({"moved": [(2, 0, SWAP)]}, True, {2: "a", 1: "b", 4: "e"}),
            ({"moved": [(2, 3, SWAP)]}, False, {0: "a", 1: "b", 4: "e"}),
            ({"moved": [(0, 1, SWAP), (1, 4, ONE_WAY)]}, True, {0: "b", 4: "a"}),
            ({"removed": [0, 3], "added": [(1, "x")], "moved": [(4, 0, ONE_WAY)]}, True, {0: "e", 1: "x"}),
        ],
    )
    def test_changes(self, changes, changed, expected):
        assert self.run({0: "a", 1: "b", 4: "e"}, **changes) == (changed, expected)


class Marks(AdapterLogitsProcessor):
    """Adds one to the token that the request names, by one of several kinds of callable."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        args = params.extra_args or {}
        if args.get("refuse"):
            raise KeyError(args["refuse"])
        if "mark" not in args:
            return None
        return getattr(self, args.get("how", "in_place"))(args["mark"])

    @staticmethod
    def in_place(token):
        def mark(output_ids, logits):
            logits[token] += 1
            return logits

        return mark

    @staticmethod
    def new_tensor(token):
        def mark(prompt_ids, output_ids, logits):
            result = logits.clone()
            result[token] += 1 + 10 * len(prompt_ids) + 100 * len(output_ids)
            return result

        return mark

    @staticmethod
    def partial(token):
        return functools.partial(lambda which, output_ids, logits: Marks.in_place(which)(output_ids, logits), token)

    @staticmethod
    def instance(token):
        class Mark:
            def __call__(self, output_ids, logits):
                return Marks.in_place(token)(output_ids, logits)

        return Mark()

    @staticmethod
    def failing(token):
        def fail(output_ids, logits):
            raise ValueError(f"not {token}")

        return fail

    @staticmethod
    def four_arguments(token):
        return lambda a, b, c, d: None


def make_marks():
    return Marks(None, torch.device("cpu"), False)


def marked(adapter, size):
    """The token that each row marks; None where none is."""
    logits = adapter.apply(torch.zeros(size, VOCAB))
    return [int(row.argmax()) if row.any() else None for row in logits]


def added(index, mark=None, how="in_place", prompt=(1,), output=()):
    args = {} if mark is None else {"mark": mark, "how": how}
    return index, SamplingParams(extra_args=args), list(prompt), list(output)


@pytest.mark.parametrize("how", ["in_place", "new_tensor", "partial", "instance"])
def test_every_kind_of_callable(how):
    adapter = make_marks()
    adapter.update_state(update(2, added=[added(0), added(1, 3, how)]))
    assert marked(adapter, 2) == [None, 3]
    adapter.update_state(None)
    assert marked(adapter, 2) == [None, 3]


def test_prompt_and_live_output_reach_the_callable():
    adapter = make_marks()
    row = added(0, 2, "new_tensor", prompt=(7, 8))
    adapter.update_state(update(1, added=[row]))
    assert adapter.apply(torch.zeros(1, VOCAB))[0, 2] == 21
    row[3].append(9)
    assert adapter.apply(torch.zeros(1, VOCAB))[0, 2] == 121


def test_a_processor_follows_its_request():
    adapter = make_marks()
    adapter.update_state(update(4, added=[added(0, 0), added(1), added(2, 2), added(3, 3)]))
    assert marked(adapter, 4) == [0, None, 2, 3]
    adapter.update_state(update(4, moved=[(0, 3, SWAP)]))
    assert marked(adapter, 4) == [3, None, 2, 0]
    adapter.update_state(update(4, moved=[(1, 2, SWAP)]))
    assert marked(adapter, 4) == [3, 2, None, 0]
    adapter.update_state(update(3, removed=[0], moved=[(3, 0, ONE_WAY)]))
    assert marked(adapter, 3) == [0, 2, None]
    adapter.update_state(update(3, added=[added(1), added(2, 4)]))
    assert marked(adapter, 3) == [0, None, 4]
    adapter.update_state(update(1, removed=[0, 2], moved=[(1, 0, ONE_WAY)]))
    assert marked(adapter, 1) == [None]


def test_a_failing_processor_leaves_the_others_their_work():
    adapter = make_marks()
    refused = (1, SamplingParams(extra_args={"refuse": "me"}), [1], [])
    adapter.update_state(
        update(5, added=[added(0, 1), refused, added(2, 3, "failing"), added(3, 4), added(4, 0, "four_arguments")])
    )
    logits = torch.zeros(5, VOCAB)
    with pytest.raises(RequestProcessorsFailed, match="index 2: ValueError: not 3") as failed:
        adapter.apply(logits)
    errors = failed.value.errors
    assert {index: type(error) for index, error in errors.items()} == {1: KeyError, 2: ValueError, 4: TypeError}
    assert logits[0, 1] == 1 and logits[3, 4] == 1
    # The failing requests go, the others move; nothing of the failures stays.
    adapter.update_state(update(2, removed=[1, 2, 4], moved=[(3, 1, ONE_WAY)]))
    assert marked(adapter, 2) == [1, 4]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", "str, not a tensor"),
        (torch.zeros(VOCAB + 1), r"a tensor of shape \(6,\), not \(5,\)"),
        (torch.zeros(1, VOCAB), r"a tensor of shape \(1, 5\), not \(5,\)"),
        (torch.zeros(VOCAB, dtype=torch.int64), "a tensor of torch.int64"),
    ],
)
def test_a_wrong_result_is_an_error(result, message):
    class Wrong(Marks):
        def new_req_logits_processor(self, params):
            return lambda output_ids, logits: result

    adapter = Wrong(None, torch.device("cpu"), False)
    adapter.update_state(update(1, added=[added(0, 1)]))
    with pytest.raises(RequestProcessorsFailed, match=message):
        adapter.apply(torch.zeros(1, VOCAB))


def test_a_result_of_another_precision_is_accepted():
    class Half(Marks):
        def new_req_logits_processor(self, params):
            return lambda output_ids, logits: (logits + 2).to(torch.float16)

    adapter = Half(None, torch.device("cpu"), False)
    adapter.update_state(update(1, added=[added(0, 1)]))
    assert torch.equal(adapter.apply(torch.zeros(1, VOCAB)), torch.full((1, VOCAB), 2.0))

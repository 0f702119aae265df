"""Drafters' proposals, held against slow searches in lists; hostile texts, rooms and histories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.config import SpeculativeConfig
from vllm.v1.features.drafts.ngram import NgramDrafter, find_last
from vllm.v1.features.drafts.suffix import OutputPool, SuffixDrafter
from vllm.v1.worker.gpu.states import RequestStates

TEXTS = {
    "one token": [7],
    "two tokens": [7, 7],
    "all alike": [3] * 200,
    "all different": list(range(300)),
    "repeats itself": [1, 2, 3] * 40,
    "long match at the start": [9, *range(20, 60), 5, *range(20, 60)],
    "ends on the first token": [4, *range(50, 90), 4],
    "few tokens": np.random.RandomState(0).randint(0, 3, 400).tolist(),
    "more tokens": np.random.RandomState(1).randint(0, 40, 400).tolist(),
}


def states_of(*texts, room=64):
    states = RequestStates(len(texts), max(map(len, texts)) + room, torch.device("cpu"))
    for number, text in enumerate(texts):
        states.add_request(str(number), list(text), len(text), 0)
    return states


def append(states, slot, tokens):
    states.append_run(slot, list(tokens))


def propose(drafter, states, slot=0, room=8):
    (draft,) = drafter.propose(np.array([slot]), states, np.array([room], dtype=np.int32))
    assert draft.dtype == np.int32
    assert len(draft) <= room
    return draft.tolist()


def ngram(least, most, num_slots=1):
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=least, prompt_lookup_max=most)
    return NgramDrafter(config, num_slots)


def suffix(**options):
    return SuffixDrafter(SpeculativeConfig(method="suffix", **options))


def last_place(text, least, most):
    """As `find_last`, place by place."""
    for size in range(min(most, len(text) - 1), least - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                return place, size
    return 0, 0


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4), (2, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_last_place_of_the_longest_match(text, lengths):
    for end in range(1, len(text) + 1, 7):
        known = text[:end]
        # Tokens beyond the known ones are of the slot's last request.
        row = np.array(known + known[:9], dtype=np.int32)
        assert find_last(row, len(known), *lengths) == last_place(known, *lengths)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ngram_copies_what_followed(text):
    drafter, states = ngram(1, 3), states_of(text)
    drafter.add_request(0, states)
    place, matched = last_place(text, 1, 3)
    expected = list(text)
    if matched:
        for _ in range(8):
            expected.append(expected[place + len(expected) - len(text)])
    assert propose(drafter, states) == expected[len(text) :]


def test_a_copy_goes_on_where_it_is():
    # After "2 3", the last place says 8, and the one that was copied from 4.
    drafter, states = ngram(2, 2), states_of([1, 2, 3, 4, 5, 6, 2, 3, 8, 0, 1, 2])
    drafter.add_request(0, states)
    assert propose(drafter, states, room=3) == [3, 4, 5]
    append(states, 0, [3])
    assert propose(drafter, states, room=2) == [4, 5]
    append(states, 0, [4, 5])
    assert propose(drafter, states, room=2) == [6, 2]
    # Not what was copied: looked up anew.
    append(states, 0, [2, 3])
    assert propose(drafter, states, room=2) == [4, 5]


def test_a_slots_next_request_begins_anew():
    drafter, states = ngram(2, 2), states_of([1, 2, 3, 4, 1, 2])
    drafter.add_request(0, states)
    assert propose(drafter, states, room=2) == [3, 4]
    drafter.remove_request(0)
    states.remove_request("0")
    states.add_request("next", [9, 8, 7, 6, 5, 4, 3, 4], 8, 0)
    drafter.add_request(0, states)
    assert propose(drafter, states, room=2) == []


@pytest.mark.parametrize("make", [lambda: ngram(1, 3, 3), suffix], ids=["ngram", "suffix"])
def test_requests_do_not_see_each_other(make):
    texts = [1, 2, 3, 1, 2], [3, 1, 7, 3, 1], [5, 6]
    drafter, states = make(), states_of(*texts)
    slots = [states.req_id_to_slot[str(number)] for number in range(3)]
    for slot in slots:
        drafter.add_request(slot, states)
    drafts = drafter.propose(np.array(slots[::-1]), states, np.array([2, 1, 2], dtype=np.int32))
    assert [draft.tolist() for draft in drafts] == [[], [7], [3, 1]]


@pytest.mark.parametrize("room", [1, 3, 50])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_suffix_stays_within_its_bounds(text, room):
    drafter, states = suffix(suffix_decoding_max_spec_factor=1.5), states_of(text)
    drafter.add_request(0, states)
    matched = last_place(text, 1, 24)[1]
    draft = propose(drafter, states, room=room)
    assert len(draft) <= 1.5 * matched
    assert bool(draft) == (matched > 0)
    if draft:
        # It follows the match somewhere.
        follows = [
            text[place] for place in range(matched, len(text)) if text[place - matched : place] == text[-matched:]
        ]
        assert draft[0] in follows


def test_suffix_drafts_what_most_places_say():
    text = [1, 2, 8, 0, 1, 2, 5, 6, 0, 1, 2, 5, 7, 0, 1, 2, 5, 6, 9, 1, 2]
    drafter, states = suffix(suffix_decoding_max_tree_depth=2, suffix_decoding_max_spec_factor=9), states_of(text)
    drafter.add_request(0, states)
    assert propose(drafter, states, room=3) == [5, 6, 9]


@pytest.mark.parametrize(("least_share", "draft"), [(0.0, [5, 6, 9]), (0.5, [5, 6]), (0.75, [5]), (0.8, [])])
def test_a_draft_ends_where_few_places_have_it(least_share, draft):
    text = [1, 2, 8, 0, 1, 2, 5, 6, 0, 1, 2, 5, 7, 0, 1, 2, 5, 6, 9, 1, 2]
    drafter = suffix(
        suffix_decoding_max_tree_depth=2,
        suffix_decoding_max_spec_factor=9,
        suffix_decoding_min_token_prob=least_share,
    )
    states = states_of(text)
    drafter.add_request(0, states)
    assert propose(drafter, states, room=3) == draft


def test_suffix_looks_up_earlier_outputs():
    drafter, states = suffix(), states_of([7, 7], [1, 2, 3], room=30)
    drafter.add_request(0, states)
    append(states, 0, range(1, 20))
    drafter.remove_request(0)
    drafter.add_request(1, states)
    assert propose(drafter, states, slot=1, room=8) == [4, 5, 6]
    # A prompt is no output.
    other = suffix()
    other.add_request(0, states)
    other.remove_request(0)
    other.add_request(1, states)
    assert propose(other, states, slot=1, room=8) == []


def test_no_earlier_outputs_where_none_are_kept():
    drafter, states = suffix(suffix_decoding_max_cached_requests=0), states_of([7, 7], [1, 2, 3], room=30)
    drafter.add_request(0, states)
    append(states, 0, range(1, 20))
    drafter.remove_request(0)
    drafter.add_request(1, states)
    assert propose(drafter, states, slot=1) == []


def found(pool, end, depth=24, room=4):
    places, matched = pool.find(np.array(end, dtype=np.int32), depth, 8)
    return matched, pool.followers(places, room).tolist()


def test_the_pool_keeps_the_last_outputs():
    pool = OutputPool(2)
    pool.add(np.arange(10, 20, dtype=np.int32))
    pool.add(np.arange(30, 40, dtype=np.int32))
    assert found(pool, [5, 12, 13, 14]) == (3, [[15, 16, 17, 18]])
    pool.add(np.arange(50, 60, dtype=np.int32))
    assert found(pool, [12, 13, 14])[0] == 0
    assert found(pool, [29, 30, 31, 32]) == (3, [[33, 34, 35, 36]])
    assert found(pool, [56, 57, 58]) == (3, [[59, -1, 0, 0]])
    assert found(pool, [57, 58])[0] == 0


def test_an_empty_pool_finds_nothing():
    assert found(OutputPool(2), [1, 2, 3])[0] == 0
    pool = OutputPool(2)
    pool.add(np.array([1, 2, 3], dtype=np.int32))
    assert found(pool, [1, 2, 3])[0] == 0


def test_a_full_ring_forgets_the_first_outputs():
    pool, outputs = OutputPool(1000, capacity=256), []
    random = np.random.RandomState(0)
    for _ in range(60):
        outputs.append(random.randint(0, 12, random.randint(4, 40)).astype(np.int32))
        pool.add(outputs[-1])
        # All of the last output is found; of those that are gone, nothing that is not elsewhere.
        matched, followers = found(pool, outputs[-1][:-1], depth=8, room=1)
        assert matched == min(len(outputs[-1]) - 1, 8)
        assert [outputs[-1][-1]] in followers
    held = outputs[-3:]
    for end in random.randint(0, 12, (200, 3)).tolist():
        places, matched = pool.find(np.array(end, dtype=np.int32), 3, 300)
        least = sum(output[at : at + 3].tolist() == end for output in held for at in range(len(output) - 2))
        assert (len(places) if matched == 3 else 0) >= least


def test_an_output_longer_than_the_ring():
    pool = OutputPool(10, capacity=64)
    pool.add(np.arange(1000, dtype=np.int32))
    assert found(pool, [990, 991, 992]) == (3, [[993, 994, 995, 996]])
    assert found(pool, [10, 11, 12])[0] == 0

"""The array-backed readings: dicts on demand, arrays, merging, pickling."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from vllm.logprobs import FlatLogprobs, Logprob, PositionLogprobs
from vllm.logprobs_lists import LogprobsLists

VOCAB = 50


def make_lists(rng, rows: int, num_topk: int, ids: list[list[int]]) -> tuple[LogprobsLists, np.ndarray]:
    """Readings of random logits, computed the slow way; returns them and the logits [rows, VOCAB]."""
    logits = rng.normal(size=(rows, VOCAB)).astype(np.float32)
    lse = np.log(np.exp(logits).sum(1))
    width = max(map(len, ids), default=0)
    token_ids = np.zeros((rows, 1 + num_topk + width), np.int32)
    token_ids[:, 0] = rng.integers(0, VOCAB, rows)
    token_ids[:, 1 : 1 + num_topk] = np.argsort(-logits, axis=1)[:, :num_topk]
    for row, wanted in enumerate(ids):
        token_ids[row, 1 + num_topk : 1 + num_topk + len(wanted)] = wanted
    chosen = np.take_along_axis(logits, token_ids, axis=1)
    ranks = 1 + (logits[:, None, :] > chosen[:, :, None]).sum(-1).astype(np.int32)
    return LogprobsLists(token_ids, chosen - lse[:, None], chosen, ranks, lse, num_topk), logits


def texts(token_ids: np.ndarray) -> list[str]:
    return [f"<{token}>" for token in token_ids]


def build(lists: LogprobsLists, num_topk: int, ids: list[list[int]], **options) -> FlatLogprobs:
    flat = FlatLogprobs(texts, num_topk, **options)
    for row, wanted in enumerate(ids):
        flat.append_later([(lists, row)], len(wanted))
    return flat


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_no_position_is_nothing_to_read(rng):
    """A delta without a token, or a request that was aborted before its first."""
    rows = []
    flat = FlatLogprobs(texts)
    flat.append_later(rows, 2)
    lists, _ = make_lists(rng, 1, 0, [[1, 2]])
    rows.append((lists, 0))
    assert len(flat) == 0 and list(flat) == [] and list(flat.parts(10)) == []
    for array in (flat.token_ids, flat.logprobs, flat.logits, flat.ranks, flat.lse, flat.start_indices):
        assert array.size == 0
    assert list(pickle.loads(pickle.dumps(flat))) == []
    flat.append_later(rows, 2)
    assert len(flat) == 1 and set(flat.token_ids.tolist()) == {int(lists.token_ids[0, 0]), 1, 2}


def test_entries_stand_in_the_contracts_order_and_hold_the_readings(rng):
    ids = [[7, 3, 9]] * 4
    lists, logits = make_lists(rng, 4, 5, ids)
    flat = build(lists, 2, ids)
    assert len(flat) == 4
    for row, position in enumerate(flat):
        sampled = int(lists.token_ids[row, 0])
        top = np.argsort(-logits[row])[:2].tolist()
        assert list(position) == list(dict.fromkeys([sampled, *top, 7, 3, 9]))
        lse = math.log(np.exp(logits[row].astype(np.float64)).sum())
        for token, entry in position.items():
            assert entry.logit == logits[row, token]
            assert entry.logprob == pytest.approx(logits[row, token] - lse, abs=1e-5)
            assert entry.rank == 1 + (logits[row] > logits[row, token]).sum()
            assert entry.decoded_token == f"<{token}>"


def test_a_neighbours_wider_columns_are_not_shown(rng):
    ids = [[7], [7, 8, 9], []]
    lists, _ = make_lists(rng, 3, 5, ids)
    flat = build(lists, 0, ids)
    for row, position in enumerate(flat):
        assert set(position) == {int(lists.token_ids[row, 0]), *ids[row]}


def test_arrays_are_flat_with_bounds_and_agree_with_the_dicts(rng):
    ids = [[1, 2], [1, 2], [3]]
    lists, _ = make_lists(rng, 3, 2, ids)
    flat = build(lists, 2, ids)
    assert flat.token_ids.dtype == flat.ranks.dtype == np.int32
    assert flat.logprobs.dtype == flat.logits.dtype == flat.lse.dtype == np.float32
    assert len(flat.lse) == 3
    for row, position in enumerate(flat):
        span = slice(flat.start_indices[row], flat.end_indices[row])
        assert flat.token_ids[span].tolist() == list(position)
        assert flat.logprobs[span].tolist() == [entry.logprob for entry in position.values()]
        assert flat.ranks[span].tolist() == [entry.rank for entry in position.values()]
        assert flat.decoded_tokens[span] == [entry.decoded_token for entry in position.values()]


def test_select_is_rectangular_and_in_the_order_asked(rng):
    ids = [[4, 2, 6]] * 3
    lists, logits = make_lists(rng, 3, 0, ids)
    flat = build(lists, 0, ids)
    chosen = flat.select([6, 4])
    np.testing.assert_array_equal(chosen.logits, logits[:, [6, 4]])
    assert chosen.ranks.shape == chosen.logprobs.shape == (3, 2)
    with pytest.raises(KeyError, match="49"):
        flat.select([6, 49])
    with pytest.raises(KeyError):
        build(lists, 0, ids).select([0, 1, 3, 5])
    assert FlatLogprobs().select([]).logprobs.shape == (0, 0)
    nothing = build(make_lists(rng, 2, 0, [[], []])[0], 0, [[], []], has_sampled=False)
    assert nothing.select([]).logprobs.shape == (2, 0)
    with pytest.raises(KeyError, match="^6$"):
        nothing.select([6])


@pytest.mark.parametrize("few", [0, 3, 64])
def test_every_way_of_merging_and_finding_agrees(rng, few, monkeypatch):
    monkeypatch.setattr("vllm.flat_arrays._FEW", few)
    for _ in range(100):
        num_topk, num_ids = rng.integers(0, 8, 2)
        ids = [rng.permutation(VOCAB)[:num_ids].tolist() for _ in range(3)]
        lists, logits = make_lists(rng, 3, num_topk, ids)
        flat = build(lists, num_topk, ids)
        for row, position in enumerate(flat):
            assert list(position) == list(dict.fromkeys(lists.token_ids[row].tolist()))
        common = sorted(set.intersection(*(set(position) for position in flat)))
        np.testing.assert_array_equal(flat.select(common).logits, logits[:, common])
        for token in set(range(VOCAB)) - set(common):
            with pytest.raises(KeyError):
                flat.select([*common, token])


def test_steps_of_different_widths_make_one_sequence(rng):
    narrow, _ = make_lists(rng, 1, 2, [[7, 3]])
    wide, _ = make_lists(rng, 2, 2, [[7, 3], [1, 2, 4, 5]])
    flat = FlatLogprobs(texts, 2)
    flat.append_later([(narrow, 0)], 2)
    flat.append_later([(wide, 0)], 2)
    for lists, position in zip((narrow, wide), flat, strict=True):
        assert list(position) == list(dict.fromkeys(lists.token_ids[0, :5].tolist()))


def test_what_was_shown_stays_when_more_rows_come(rng):
    lists, _ = make_lists(rng, 3, 0, [[4]] * 3)
    rows, shown = [], []
    for row in range(3):
        rows.append((lists, row))
        shown.append(FlatLogprobs(texts, 0))
        shown[-1].append_later(rows, 1)
    for length, flat in enumerate(shown, 1):
        assert len(flat) == length
        assert list(flat) == list(build(lists, 0, [[4]] * length))


def test_growth_after_a_look_is_seen(rng):
    ids = [[4]] * 3
    lists, _ = make_lists(rng, 3, 0, ids)
    flat = build(lists, 0, ids[:1])
    first = flat[0]
    flat.append_later([(lists, 1)], 1)
    assert len(flat) == 2
    assert flat[0] == first
    assert 4 in flat[1]
    assert flat[-1] == flat[1]
    with pytest.raises(IndexError):
        flat[2]
    assert [list(p) for p in flat[0:2]] == [list(flat[0]), list(flat[1])]


def test_logit_modes_put_the_logit_where_the_logprob_was(rng):
    ids = [[4]]
    lists, logits = make_lists(rng, 1, 0, ids)
    assert build(lists, 0, ids, as_logits=True)[0][4].logprob == logits[0, 4]


def test_pickle_keeps_everything_but_the_neighbours_rows(rng):
    ids = [[4]] * 64
    lists, _ = make_lists(rng, 64, 0, ids)
    flat = FlatLogprobs(texts)
    flat.append_later([(lists, 0)], 1)
    data = pickle.dumps(flat)
    assert len(data) < 2000
    assert pickle.loads(data) == flat
    assert pickle.loads(data)[0].mass([4]) == flat[0].mass([4])


def test_mass_and_softmax():
    position = PositionLogprobs({1: Logprob(-1.0, 1, None, 2.0), 2: Logprob(-2.0, 2, None, 1.0)}.items(), lse=3.0)
    assert position.mass([1, 2, 1]) == pytest.approx(math.exp(-1) + math.exp(-2))
    shares = position.softmax([2, 1])
    assert list(shares) == [2, 1]
    assert shares[1] == pytest.approx(1 / (1 + math.exp(-1)))
    assert sum(shares.values()) == pytest.approx(1)
    with pytest.raises(KeyError):
        position.mass([3])


def test_masked_out_ids_have_no_distribution():
    masked = PositionLogprobs({1: Logprob(-math.inf, 9, None, -math.inf)}.items(), lse=0.0)
    assert masked.mass([1]) == 0.0
    assert math.isnan(masked.softmax([1])[1])

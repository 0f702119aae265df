"""The array-backed readings: dicts on demand, arrays, merging, pickling."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest

from vllm.logprobs import FlatLogprobs, Logprob, PositionLogprobs, WidePositionLogprobs
from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.logprobs.prompt import PromptLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor, PromptLogprobsProcessor

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
        flat.append((lists, row), len(wanted))
    return flat


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_no_position_is_nothing_to_read(rng):
    """A delta without a token, or a request that was aborted before its first."""
    flat = FlatLogprobs(texts)
    empty = flat.snapshot()
    lists, _ = make_lists(rng, 1, 0, [[1, 2]])
    flat.append((lists, 0), 2)
    assert len(empty) == 0 and list(empty) == [] and list(empty.parts(10)) == []
    for array in (empty.token_ids, empty.logprobs, empty.logits, empty.ranks, empty.lse, empty.start_indices):
        assert array.size == 0
    assert list(pickle.loads(pickle.dumps(empty))) == []
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
    assert FlatLogprobs(None).select([]).logprobs.shape == (0, 0)
    nothing = build(make_lists(rng, 2, 0, [[], []])[0], 0, [[], []], has_sampled=False)
    assert nothing.select([]).logprobs.shape == (2, 0)
    with pytest.raises(KeyError, match="^6$"):
        nothing.select([6])


@pytest.mark.parametrize("few", [0, 3, 64])
def test_every_way_of_merging_and_finding_agrees(rng, few, monkeypatch):
    monkeypatch.setattr("vllm.logprobs.flat._FEW", few)
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
    flat.append((narrow, 0), 2)
    flat.append((wide, 0), 2)
    for lists, position in zip((narrow, wide), flat, strict=True):
        assert list(position) == list(dict.fromkeys(lists.token_ids[0, :5].tolist()))


@pytest.mark.parametrize("looked_at", [False, True])
def test_what_was_shown_stays_when_more_rows_come(rng, looked_at):
    lists, _ = make_lists(rng, 3, 0, [[4]] * 3)
    flat, shown = FlatLogprobs(texts, 0), []
    for row in range(3):
        flat.append((lists, row), 1)
        shown.append(flat.snapshot())
        if looked_at:
            assert len(flat.lse) == row + 1
    for length, snapshot in enumerate(shown, 1):
        assert len(snapshot) == length
        assert list(snapshot) == list(build(lists, 0, [[4]] * length))


def test_growth_after_a_look_is_seen(rng):
    ids = [[4]] * 3
    lists, _ = make_lists(rng, 3, 0, ids)
    flat = build(lists, 0, ids[:1])
    first = flat[0]
    flat.append((lists, 1), 1)
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
    flat.append((lists, 0), 1)
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


# -- what is kept ---------------------------------------------------------------------------------------------------


def held_bytes(keep) -> int:
    """The bytes that `keep(tables)` holds of 100 steps' tables, 256 rows of 149 columns each, when the steps are
    over."""

    def tables():
        rng = np.random.default_rng(1)
        for _ in range(100):
            table = np.zeros((256, 4 * 149 + 2), np.int32)
            table[0, :149] = rng.permutation(1000)[:149]
            yield LogprobsLists.of_table(table, num_topk=20, has_entropy=False)

    tracemalloc.start()
    try:
        kept = keep(tables())
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept is not None
    return size


# A table is 610 kB, all of them are 61 MB.
def test_a_request_keeps_its_own_rows_alone():
    def keep(tables):
        processor = LogprobsProcessor(SamplingParams(logprobs=1, max_tokens=100), None)
        for lists in tables:
            processor.append([(lists, 0)])
        return processor, processor.readings()

    assert held_bytes(keep) < 30_000


def test_deltas_that_nobody_reads_keep_their_own_rows_alone():
    def keep(tables):
        processor = LogprobsProcessor(SamplingParams(logprob_token_ids=[1, 2], max_tokens=100), None)
        deltas = []
        for lists in tables:
            processor.append([(lists, 0)])
            deltas.append(processor.take())
        return deltas

    assert held_bytes(keep) < 200_000


def test_a_prompt_keeps_its_own_rows_alone():
    def keep(tables):
        processor = PromptLogprobsProcessor(SamplingParams(prompt_logprobs=1), 1000, None)
        for lists in tables:
            processor.append([LogprobsRows(lists, slice(0, 2), 0)])
        return processor

    assert held_bytes(keep) < 60_000


def test_own_columns_are_the_same_from_a_table_from_arrays_and_from_wide_rows(rng, monkeypatch):
    ids = [[7, 3, 9], [1], []]
    lists, _ = make_lists(rng, 3, 5, ids)
    tables = LogprobsLists.of_table(lists.table().copy(), 5, has_entropy=False)
    for num_topk in (-1, 0, 2, 5):
        expected = build(lists, num_topk, ids)
        assert build(tables, num_topk, ids) == expected
        monkeypatch.setattr("vllm.logprobs.lists.WIDEST_TABLE", 0)
        wide, _ = make_lists(np.random.default_rng(0), 3, 5, ids)
        assert build(wide, num_topk, ids) == expected
        monkeypatch.undo()


# -- positions of many entries --------------------------------------------------------------------------------------


def wide_and_dict(rng, monkeypatch) -> tuple[WidePositionLogprobs, PositionLogprobs]:
    ids = [list(range(20))]
    lists, _ = make_lists(rng, 1, VOCAB, ids)
    narrow = build(lists, -1, ids)[0]
    monkeypatch.setattr("vllm.logprobs.flat.WIDEST_DICT", 20)
    wide = build(lists, -1, ids)[0]
    assert type(narrow) is PositionLogprobs and type(wide) is WidePositionLogprobs
    return wide, narrow


def test_dicts_up_to_256_entries(rng):
    for num_ids, kind in ((255, PositionLogprobs), (256, WidePositionLogprobs)):
        ids = np.arange(1 + num_ids, dtype=np.int32)[None]
        ones = np.ones(ids.shape, np.float32)
        flat = FlatLogprobs(None)
        flat.append((LogprobsLists(ids, ones, ones, ids, ones[:, 0], 0), 0), num_ids)
        assert type(flat[0]) is kind and len(flat[0]) == 1 + num_ids


def test_a_wide_position_reads_as_the_dict_does(rng, monkeypatch):
    wide, narrow = wide_and_dict(rng, monkeypatch)
    assert isinstance(wide, Mapping) and len(wide) == len(narrow) == VOCAB
    # More looks than are scans, in both directions.
    for token_id in [*narrow, *reversed(list(narrow))]:
        assert wide[token_id] == narrow[token_id] == wide.get(np.int32(token_id))
        assert token_id in wide
    for position in (wide, WidePositionLogprobs(wide._columns, texts, wide.lse)):
        for _ in range(12):
            for missing in (VOCAB, -1, 2**70, "x", None):
                assert missing not in position and position.get(missing) is None
                with pytest.raises(KeyError, match=str(missing)):
                    position[missing]
    assert list(wide) == list(wide.keys()) == list(narrow) and list(wide)[:5] == list(narrow)[:5]
    assert list(reversed(wide)) == list(reversed(narrow))
    assert list(wide.items()) == list(narrow.items()) and list(wide.values()) == list(narrow.values())
    assert (7, narrow[7]) in wide.items() and narrow[7] in wide.values()
    best = max(narrow, key=lambda token_id: narrow[token_id].logprob)
    assert max(wide, key=lambda token_id: wide[token_id].logprob) == best
    assert max(wide.items(), key=lambda item: item[1].logprob)[0] == best
    assert wide == narrow and narrow == wide and wide == dict(narrow) and dict(wide) == narrow
    assert wide != {**narrow, 7: Logprob(0.0)} and wide != {} and wide != 1
    assert wide.mass([3, 5]) == narrow.mass([3, 5]) and wide.softmax([3, 5]) == narrow.softmax([3, 5])
    assert (wide.lse, wide.entropy) == (narrow.lse, narrow.entropy)


def test_a_wide_position_makes_objects_for_the_entries_looked_at_only(rng, monkeypatch):
    decoded = []
    ids = [list(range(20))]
    lists, _ = make_lists(rng, 1, VOCAB, ids)
    monkeypatch.setattr("vllm.logprobs.flat.WIDEST_DICT", 20)
    flat = FlatLogprobs(lambda token_ids: decoded.extend(token_ids.tolist()) or texts(token_ids), -1)
    flat.append((lists, 0), 20)
    assert flat[0][7].decoded_token == "<7>" and 8 in flat[0] and list(flat[0])
    assert decoded == [7]
    shown = repr(flat[0])
    assert len(decoded) < 10 and shown.count("Logprob(") == len(decoded) - 1
    assert f"{VOCAB - len(decoded) + 1} more" in shown


def test_a_wide_position_copies_and_pickles(rng, monkeypatch):
    wide, narrow = wide_and_dict(rng, monkeypatch)
    changed = wide.copy()
    changed[7] = None
    assert isinstance(changed, dict) and wide[7] == narrow[7]
    for same in (copy.copy(wide), copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert type(same) is WidePositionLogprobs and same == narrow
        assert (same.lse, same.entropy) == (wide.lse, wide.entropy) and same[7].decoded_token == "<7>"


@pytest.mark.parametrize("kind", [FlatLogprobs, PromptLogprobs])
def test_readings_pass_for_the_lists_that_they_stand_for(rng, kind):
    """Callers ask for a list before they read positions; what they do next makes no copy of what was read."""
    lists, _ = make_lists(rng, 2, 0, [[4], [4]])
    flat = kind(decode=texts)
    flat.append((lists, 0), 1)
    assert isinstance(flat, list) and isinstance(flat, kind) and isinstance(flat, FlatLogprobs)
    assert type(flat) is kind and not isinstance([], FlatLogprobs)
    for other in (copy.copy(flat), copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert type(other) is kind and other == flat and isinstance(other, list)
    assert flat == list(flat) and list(flat) == flat

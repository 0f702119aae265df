"""The search itself, driven by transformers' own logprobs: what it finds is what transformers' beam search finds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from beam_search_reference import transformers_search
from models_util import make_hf_model

from vllm.params.beam_search import beam_search_score
from vllm.v1.engine.plans.beam_search import BeamSearch, Hypothesis

VOCAB_SIZE = 29
PROMPTS = [[24, 18, 14], [2, 0, 5], [2, 8, 13], [7, 8, 1]]
MANY_EOS = list(range(2, 12))
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
# length_penalty, max_tokens, ids that end a sequence
CASES = [(penalty, 12, eos) for penalty in LENGTH_PENALTIES for eos in ([2], MANY_EOS)]
CASES += [(1.0, 12, None), (1.0, 1, MANY_EOS), (-1.0, 1, [2])]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    """With distributions flat enough for sequences of very different lengths to compete."""
    model = make_hf_model("llama", num_hidden_layers=1, hidden_size=32, vocab_size=VOCAB_SIZE, seed=2)
    model.model.norm.weight.data.mul_(0.4)
    return model


@torch.no_grad()
def read(model: Any, queries: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The whole vocabulary's logprobs after each query (all of one length), in an order that means nothing."""
    logprobs = model(torch.tensor(queries)).logits[:, -1].log_softmax(-1).numpy()
    order = np.random.default_rng(0).permutation(logprobs.shape[1])
    return [(order, row[order]) for row in logprobs]


def run(model: Any, search: BeamSearch) -> list[Hypothesis]:
    while not search.finished:
        search.advance(read(model, search.queries()))
    assert search.queries() == []
    return search.results()


def assert_same(results: list[Hypothesis], expected: list[tuple[list[int], float]]) -> None:
    assert [each.token_ids for each in results] == [token_ids for token_ids, _ in expected]
    assert [each.score for each in results] == pytest.approx([score for _, score in expected], abs=1e-4)


# When a search ends depends on early_stopping together with the cases' penalties; the width only on how many there are.
@pytest.mark.parametrize(("width", "early_stopping"), [(4, True), (4, False), (4, "never"), (2, "never"), (5, False)])
def test_equals_transformers(model, width, early_stopping):
    for length_penalty, max_tokens, eos in CASES:
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        expected = transformers_search(model, PROMPTS, width, eos, max_new_tokens=max_tokens, **options)
        for prompt, own in zip(PROMPTS, expected, strict=True):
            search = BeamSearch(prompt, width, max_tokens, eos or (), **options)
            assert_same(run(model, search), own)


def test_the_cases_compared_are_different_ones(model):
    """Hypotheses end early and late, and every setting changes some result."""
    found: dict[Any, Any] = {}
    for length_penalty, early_stopping in itertools.product(LENGTH_PENALTIES, (True, False, "never")):
        key = (length_penalty, early_stopping)
        found[key] = [
            [each.token_ids for each in run(model, BeamSearch(prompt, 4, 12, MANY_EOS, (), *key))] for prompt in PROMPTS
        ]
    lengths = {len(tokens) for results in found.values() for result in results for tokens in result}
    assert {1, 12} < lengths and len(lengths) > 5
    assert found[1.0, True] != found[1.0, False] != found[1.0, "never"] != found[1.0, True]
    assert len({str(found[penalty, "never"]) for penalty in LENGTH_PENALTIES}) >= 3


def test_a_vocabulary_smaller_than_the_candidates():
    model = make_hf_model("llama", num_hidden_layers=1, hidden_size=32, vocab_size=8)
    prompts = [[5, 3], [1, 7]]
    expected = transformers_search(model, prompts, 5, [2], max_new_tokens=6)
    for prompt, own in zip(prompts, expected, strict=True):
        search = BeamSearch(prompt, 5, 6, [2])
        assert search.num_candidates == 6
        assert_same(run(model, search), own)


@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
def test_a_width_that_holds_everything_finds_the_true_order(model, length_penalty):
    """Every sequence of three tokens out of three, ended early by one of them, scored one by one."""
    table = np.random.default_rng(1).normal(size=(40, 3))
    table -= np.log(np.exp(table).sum(axis=1, keepdims=True))

    def logprobs_after(tokens: tuple[int, ...]) -> np.ndarray:
        return table[sum((token + 1) * 3**i for i, token in enumerate(tokens)) % 40]

    scored = []
    for length in (1, 2, 3):
        for tokens in itertools.product(range(3), repeat=length):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == 3):
                total = sum(logprobs_after(tokens[:i])[token] for i, token in enumerate(tokens))
                scored.append((total / length**length_penalty, list(tokens)))
    scored.sort(reverse=True)
    search = BeamSearch([7], len(scored), 3, [0], length_penalty=length_penalty, early_stopping="never")
    while not search.finished:
        search.advance([(np.arange(3), logprobs_after(tuple(query[1:]))) for query in search.queries()])
    assert [each.token_ids for each in search.results()] == [tokens for _, tokens in scored]
    assert [each.score for each in search.results()] == pytest.approx([score for score, _ in scored])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_one_beam_is_greedy_search(model, early_stopping):
    ended = []
    for prompt in PROMPTS:
        (found,) = run(model, BeamSearch(prompt, 1, 12, MANY_EOS, length_penalty=2.0, early_stopping=early_stopping))
        tokens: list[int] = []
        total = 0.0
        while len(tokens) < 12 and not (tokens and tokens[-1] in MANY_EOS):
            ((ids, logprobs),) = read(model, [prompt + tokens])
            tokens.append(int(ids[logprobs.argmax()]))
            total += float(logprobs.max())
        assert found.token_ids == tokens
        assert found.cum_logprob == pytest.approx(total)
        assert found.score == pytest.approx(total / len(tokens) ** 2)
        ended.append(found.finish_reason)
    assert "stop" in ended


def test_the_candidates_it_asks_for_are_enough(model):
    for prompt, stop in itertools.product(PROMPTS, ([], [3, 4, 5, 6])):
        whole = BeamSearch(prompt, 3, 8, [2, 9], stop)
        short = BeamSearch(prompt, 3, 8, [2, 9], stop)
        assert short.num_candidates == 5 + len(stop)
        while not short.finished:
            candidates = read(model, short.queries())
            best = [np.argsort(-logprobs)[: short.num_candidates] for _, logprobs in candidates]
            whole.advance(candidates)
            short.advance([(ids[top], lps[top]) for (ids, lps), top in zip(candidates, best, strict=True)])
        assert whole.finished and whole.results() == short.results()


def test_the_first_step_asks_once_and_the_path_names_each_token_s_query(model):
    search = BeamSearch(PROMPTS[0], 4, 6, [2, 9])
    assert search.queries() == [PROMPTS[0]]
    readings = []
    while not search.finished:
        queries = search.queries()
        assert len(queries) <= 4 and len({tuple(query) for query in queries}) == len(queries)
        readings.append((queries, read(model, queries)))
        search.advance(readings[-1][1])
    assert len(search.results()) == 4
    for found in search.results():
        total = 0.0
        for step, (token_id, query) in enumerate(zip(found.token_ids, found.path, strict=True)):
            queries, candidates = readings[step]
            assert queries[query] == PROMPTS[0] + found.token_ids[:step]
            ids, logprobs = candidates[query]
            total += float(logprobs[ids == token_id][0])
        assert found.cum_logprob == pytest.approx(total)


def test_why_hypotheses_end():
    search = BeamSearch([1], 4, 1, eos_token_ids=[0, 1], stop_token_ids=[1, 2])
    search.advance([(np.arange(4), np.log(np.array([0.4, 0.3, 0.2, 0.1])))])
    ends = [(each.finish_reason, each.stop_reason) for each in search.results()]
    # An id that is both counts as the end of the sequence, as in an ordinary request.
    assert ends == [("stop", None), ("stop", None), ("stop", 2), ("length", None)]


def test_an_ending_below_the_first_width_candidates_does_not_count():
    search = BeamSearch([1], 2, 2, eos_token_ids=[0], early_stopping=True)
    search.advance([(np.arange(3), np.log(np.array([0.2, 0.5, 0.3])))])
    assert search.results() == [] and search.queries() == [[1, 1], [1, 2]]


@pytest.mark.parametrize(("early_stopping", "ends"), [(True, True), (False, False), ("never", False)])
def test_a_negative_penalty_bounds_a_beam_by_its_present_length(early_stopping, ends):
    """Hypotheses at -1.0 * 1 and -1.3 * 2, the best beam at -1.25 * 2: it is ahead of one of them, though it would not
    be at the greatest length."""
    search = BeamSearch([7], 2, 10, eos_token_ids=[0], length_penalty=-1.0, early_stopping=early_stopping)
    search.advance([(np.arange(3), np.array([-1.0, -1.2, -1.6]))])
    search.advance([(np.arange(3), np.array([-0.1, -0.05, -9.0])), (np.arange(3), np.full(3, -9.0))])
    assert [each.score for each in search.results()] == pytest.approx([-1.0, -2.6])
    assert search.finished == ends


def test_what_is_ruled_out_is_never_taken():
    search = BeamSearch([1], 3, 2)
    search.advance([(np.arange(4), np.array([-np.inf, -0.5, -np.inf, -1.0]))])
    assert search.queries() == [[1, 1], [1, 3]]
    search.advance([(np.arange(4), np.array([-np.inf, 0.0, -np.inf, -np.inf]))] * 2)
    assert [each.token_ids for each in search.results()] == [[1, 1], [3, 1]]
    dead = BeamSearch([1], 2, 5)
    dead.advance([(np.arange(2), np.full(2, -np.inf))])
    assert dead.finished and dead.results() == []


def test_what_a_step_made_of_the_beams():
    search = BeamSearch([1], 2, 3, eos_token_ids=[0])
    search.advance([(np.arange(3), np.log(np.array([0.5, 0.3, 0.2])))])
    assert [(each.token_ids, each.path) for each in search.latest()] == [([1], [0]), ([2], [0]), ([0], [0])]
    search.advance([(np.arange(3), np.log(np.array([0.1, 0.5, 0.4])))] * 2)
    assert [(each.token_ids, each.path) for each in search.latest()] == [([1, 1], [0, 0]), ([1, 2], [0, 0])]


def test_as_many_answers_as_queries():
    search = BeamSearch([1], 2, 2)
    for candidates in ([], [(np.arange(2), np.zeros(2))] * 2):
        with pytest.raises(ValueError):
            search.advance(candidates)
    search.advance([(np.arange(2), np.zeros(2))])
    assert len(search.queries()) == 2


@pytest.mark.parametrize("length_penalty", [-100.0, -3.0, 0.0, 3.0, 100.0])
@pytest.mark.parametrize("length", [1, 7, 10**6])
def test_scores_stay_finite_and_ordered(length, length_penalty):
    low, high = (beam_search_score(total, length, length_penalty) for total in (-50.5, -50.0))
    assert math.isfinite(low) and low < high < 0
    if abs(length_penalty) <= 3:
        assert high == pytest.approx(-50.0 / length**length_penalty)

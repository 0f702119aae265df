"""With drafts, random requests draw from exactly the distribution that they draw from without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_harness import EOS, Harness

from vllm import SamplingParams
from vllm.v1.features.drafts import verify as verification
from vllm.v1.features.drafts.verify import expand, verify
from vllm.v1.outputs import ModelRunnerOutput

VOCAB = 8
NUM_REQS = 1000
NUM_DRAFTS = 2
MANY, FEWER = 200_000, 40_000
PROMPT = (3, 4, 5)
STOP = 1

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k, top_p, min_p": {"top_k": 5, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "logit_bias": {"logit_bias": {2: 1.0, 6: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 4, 6, 7]},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.01},
    "min_tokens": {"min_tokens": 10_000, "stop_token_ids": [STOP]},
}


def table() -> np.ndarray:
    """float32 [V, V]: the logits after each token."""
    return np.random.default_rng(3).normal(0.0, 1.2, (VOCAB, VOCAB)).astype(np.float32)


def exact(logits: np.ndarray, history: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [R, V]: the distribution after `logits`, [R, V]; `history`, [R, V], counts each token generated."""
    x = logits.astype(np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        x[:, token_id] += bias
    if params.allowed_token_ids:
        x[:, [each for each in range(VOCAB) if each not in params.allowed_token_ids]] = -np.inf
    if params.min_tokens:
        x[:, [STOP, *EOS]] = -np.inf
    seen = history > 0
    seen[:, PROMPT] = True
    scale = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / scale, x * scale), x)
    x = x - params.frequency_penalty * history - params.presence_penalty * (history > 0)
    p = np.exp((x - x.max(axis=1, keepdims=True)) / params.temperature)
    p[p < params.min_p * p.max(axis=1, keepdims=True)] = 0.0
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    if params.top_k > 0:
        ranked[:, params.top_k :] = 0.0
    ranked /= ranked.sum(axis=1, keepdims=True)
    ranked[np.cumsum(ranked, axis=1) - ranked >= params.top_p] = 0.0
    np.put_along_axis(p, order, ranked / ranked.sum(axis=1, keepdims=True), axis=1)
    return p


def statistic(fields: dict[str, Any], num_draws: int = MANY) -> tuple[float, int, float]:
    """Chi-square of a Markov chain's transitions against the exact ones, its degrees of freedom, and the share of
    drafts that were right. Requests draw from rows that depend on the token before; a draft is what is most likely,
    except that it names another token at every third position."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 10_000, **fields})
    harness = Harness(VOCAB, max_model_len=2000, max_num_reqs=NUM_REQS)
    for _ in range(NUM_REQS):
        harness.add(params, PROMPT)
    harness.sampler.apply_staged_writes()
    states, logits, slots = harness.states, table(), np.arange(NUM_REQS)
    counts, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    history = np.zeros((NUM_REQS, VOCAB))
    num_right = num_drafted = 0
    while counts.sum() < num_draws:
        starts = states.total_len[slots].copy()
        last = states.token_ids[slots, starts - 1]
        for step in range(NUM_DRAFTS):
            likely = logits[last].argmax(axis=1)
            last = np.where((starts + step) % 3 == 0, (likely + 1) % VOCAB, likely).astype(np.int32)
            states.token_ids[slots, starts + step] = last
        rows = expand(slots, np.full(NUM_REQS, NUM_DRAFTS, np.int32), states)
        given = logits[states.token_ids[rows.expanded_idx_mapping, rows.lengths - 1]]
        found = verify(harness.sampler, torch.from_numpy(given), rows, states, None)
        names = [str(slot) for slot in slots]
        output = ModelRunnerOutput(names, np.full(NUM_REQS, -1, np.int32), [None] * NUM_REQS)
        assert not found.put_into(output, states)
        num_right, num_drafted = num_right + int(found.num_accepted.sum()), num_drafted + NUM_REQS * NUM_DRAFTS
        for step in range(NUM_DRAFTS + 1):
            own = slots[starts + step < states.total_len[slots]]
            before = states.token_ids[own, starts[own] + step - 1]
            drawn = states.token_ids[own, starts[own] + step]
            np.add.at(expected, before, exact(logits[before], history[own], params))
            np.add.at(counts, (before, drawn), 1)
            history[own, drawn] += 1
    assert (counts[expected == 0] == 0).all()
    likely_enough = expected > 5
    difference = (counts - expected)[likely_enough]
    freedom = int(likely_enough.sum()) - int(likely_enough.any(axis=1).sum())
    return float((difference**2 / expected[likely_enough]).sum()), freedom, num_right / num_drafted


def too_much(freedom: int) -> float:
    """The bound that chi-square exceeds once in 30000 times."""
    return freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("option", OPTIONS)
def test_drawn_as_without_drafts(option: str) -> None:
    # Options that pass the rows to the same code in the same way need less.
    num_draws = MANY if option in ("temperature", "top_k, top_p, min_p", "penalties") else FEWER
    chi_square, freedom, share_right = statistic(OPTIONS[option], num_draws)
    assert share_right > 0.1
    assert freedom > 5
    assert chi_square < too_much(freedom)


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is accepted, too, where the token below it was drawn: a little too often."""

    def accept_more(found: Any, start: int, end: int) -> int:
        drawn, drafts = found.token_ids[start:end], found._drafts[start:end]
        drawn[:-1] = np.where((drawn[:-1] == 0) & (drafts[:-1] == 1), drafts[:-1], drawn[:-1])
        return num_accepted(found, start, end)

    num_accepted = verification._Results.num_accepted
    monkeypatch.setattr(verification._Results, "num_accepted", accept_more)
    chi_square, freedom, _ = statistic({})
    assert chi_square > 10 * too_much(freedom)

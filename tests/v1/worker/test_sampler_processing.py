"""Logits before the draw, against numpy loops and transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_harness import EOS, VOCAB, Harness, dense_logits, everything, random_logits
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import sampler as sampler_module

PROMPT = [3, 4, 5, 4, 9]
GENERATED = [10, 11, 10, 4, 10]


@pytest.fixture(autouse=True)
def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "device", torch.device(device))


def reference(logits: np.ndarray, params: SamplingParams, prompt: list[int], generated: list[int]) -> np.ndarray:
    """One row, one token at a time, in float64."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(generated) < params.min_tokens:
        for token in (*EOS, *(params.stop_token_ids or ())):
            x[token] = -np.inf
    for token in range(len(x)):
        if token in prompt or token in generated:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = generated.count(token)
        x[token] -= params.frequency_penalty * count
        x[token] -= params.presence_penalty * (count > 0)
    if params.is_greedy:
        return x
    x /= params.temperature
    if params.min_p > 0:
        x[np.exp(x - x.max()) < params.min_p] = -np.inf
    if 0 < params.top_k < len(x):
        order = np.argsort(-x, kind="stable")
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        probs = np.exp(x[order] - x.max())
        probs /= probs.sum()
        before = np.cumsum(probs) - probs
        x[order[1:][before[1:] >= params.top_p]] = -np.inf
    return x


CASES: dict[str, dict] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "presence": {"presence_penalty": 1.3},
    "presence bonus": {"presence_penalty": -1.3},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.4},
    "repetition bonus": {"repetition_penalty": 0.6},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.9},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {0: 5.0, VOCAB - 1: -100.0, 10: 2.0, 4: 100.0}},
    "one bias": {"logit_bias": {17: -3.5}},
    "bias and repetition": {"logit_bias": {4: -30.0, 10: 30.0}, "repetition_penalty": 1.5},
    "allowed": {"allowed_token_ids": [10, 3, 0, VOCAB - 1, 50, 51, 52]},
    "allowed and biased": {"allowed_token_ids": [10, 3, 60], "logit_bias": {3: 2.0, 61: 50.0}},
    "one allowed": {"allowed_token_ids": [42]},
    "all allowed": {"allowed_token_ids": list(range(VOCAB))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [30, 31]},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": [30, 31]},
    "min_tokens ignore_eos": {"min_tokens": 6, "ignore_eos": True},
    "min_p": {"min_p": 0.05},
    "min_p one": {"min_p": 1.0, "temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_k one": {"top_k": 1},
    "top_k all": {"top_k": VOCAB},
    "top_k more than all": {"top_k": 10 * VOCAB},
    "top_k all but one": {"top_k": VOCAB - 1},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "top_p nearly one": {"top_p": 0.999},
    "top_p hot": {"top_p": 0.97, "temperature": 4.0},
    "top_k top_p": {"top_k": 20, "top_p": 0.6, "temperature": 1.5},
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {10: 4.0, 12: -4.0},
        "allowed_token_ids": list(range(100)),
        "min_tokens": 9,
        "stop_token_ids": [5, 6],
    },
}


def assert_processed(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_each_feature_alone(name: str) -> None:
    harness = Harness()
    slot = harness.add(everything(**CASES[name]), PROMPT, GENERATED)
    logits = random_logits(1, seed=len(name))[0]
    expected = reference(logits.numpy(), everything(**CASES[name]), PROMPT, GENERATED)
    assert_processed(harness.processed(logits, slot), expected)


def test_mixed_batch_equals_each_row_alone_bit_for_bit() -> None:
    names = list(CASES)
    logits = random_logits(len(names), seed=5)
    for start in range(0, len(names), 12):
        part = range(start, min(start + 12, len(names)))
        harness = Harness()
        slots = [
            harness.add(everything(seed=i, **CASES[names[i]]), PROMPT[: 1 + i % 5], GENERATED[: i % 6]) for i in part
        ]
        together = harness.step(logits[list(part)], slots)
        for row, i in enumerate(part):
            alone_harness = Harness()
            slot = alone_harness.add(everything(seed=i, **CASES[names[i]]), PROMPT[: 1 + i % 5], GENERATED[: i % 6])
            alone = alone_harness.step(logits[i : i + 1], [slot])
            assert together.sampled_token_ids[row] == alone.sampled_token_ids[0], names[i]

            np.testing.assert_array_equal(
                dense_logits(together, row, VOCAB), dense_logits(alone, 0, VOCAB), err_msg=names[i]
            )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 11}, TopKLogitsWarper(11)),
        ({"top_p": 0.85}, TopPLogitsWarper(0.85)),
        ({"top_p": 0.05}, TopPLogitsWarper(0.05)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
    ],
)
def test_truncation_equals_transformers(params: dict, warper: object, seed: int) -> None:
    harness = Harness()
    logits = random_logits(1, seed=seed)
    slot = harness.add(everything(**params))
    expected = warper(torch.tensor([[3, 4, 5]]), logits.clone())[0].numpy()  # type: ignore[operator]
    np.testing.assert_array_equal(harness.processed(logits[0], slot), expected)


def test_repetition_penalty_equals_transformers() -> None:
    harness = Harness()
    logits = random_logits(1, seed=9)
    slot = harness.add(everything(repetition_penalty=1.3), PROMPT, GENERATED)
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([PROMPT + GENERATED]), logits.clone())[0].numpy()
    np.testing.assert_allclose(harness.processed(logits[0], slot), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
def test_top_p_looks_as_far_as_it_must(scale: float, top_p: float) -> None:
    """A flat distribution's nucleus is most of the vocabulary."""
    vocab_size = 3000
    harness = Harness(vocab_size)
    logits = random_logits(1, vocab_size, seed=1, scale=scale)[0]
    params = everything(top_p=top_p)
    actual = harness.processed(logits, harness.add(params))
    # At the edge of the nucleus rounding may decide on one token either way.
    assert abs(np.isfinite(actual).sum() - np.isfinite(reference(logits.numpy(), params, [], [])).sum()) <= 1
    if scale == 0.0:
        kept = np.flatnonzero(np.isfinite(actual))
        np.testing.assert_array_equal(kept, np.arange(len(kept)))


def test_top_p_rows_of_different_breadth_share_a_batch() -> None:
    vocab_size = 3000
    rows = [random_logits(1, vocab_size, seed=i, scale=scale)[0] for i, scale in enumerate((5.0, 0.01, 2.0, 0.5))]
    harness = Harness(vocab_size)
    slots = [harness.add(everything(top_p=0.9)) for _ in rows]
    together = harness.step(torch.stack(rows), slots)

    for row, logits in enumerate(rows):
        alone = harness.processed(logits, slots[row])
        np.testing.assert_array_equal(dense_logits(together, row, vocab_size), alone)


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    harness = Harness()
    logits = torch.zeros(VOCAB)
    logits[[100, 50]] = 1.0
    kept = np.flatnonzero(np.isfinite(harness.processed(logits, harness.add(everything(top_k=4)))))
    np.testing.assert_array_equal(kept, [0, 1, 50, 100])
    assert harness.step(logits[None], [harness.add(SamplingParams(top_k=1))]).sampled_token_ids.tolist() == [50]


def test_a_stale_tail_of_token_ids_is_not_counted() -> None:
    harness = Harness()
    first = harness.add(everything(), [150] * 40, [151] * 10)
    harness.remove(first)
    params = everything(repetition_penalty=1.5, presence_penalty=1.0)
    slot = harness.add(params, PROMPT, GENERATED)
    long = harness.add(params, [20] * 50, [21])
    assert slot == first
    logits = random_logits(2, seed=3)

    output = harness.step(logits, [slot, long])
    assert_processed(dense_logits(output, 0, VOCAB), reference(logits[0].numpy(), params, PROMPT, GENERATED))
    assert_processed(dense_logits(output, 1, VOCAB), reference(logits[1].numpy(), params, [20] * 50, [21]))


def test_penalties_follow_the_generated_tokens() -> None:
    harness = Harness()
    params = everything(frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=2)
    slot = harness.add(params, PROMPT)
    generated: list[int] = []
    for step in range(4):
        logits = random_logits(1, seed=step)[0]
        assert_processed(harness.processed(logits, slot), reference(logits.numpy(), params, PROMPT, generated))
        generated.append(17 + step % 2)
        harness.states.append_sampled(np.array([slot]), np.array([generated[-1]], dtype=np.int32))


def test_slot_reuse_leaves_nothing_behind() -> None:
    logits = random_logits(1, seed=21)[0]
    for name in CASES:
        harness = Harness()
        slot = harness.add(everything(**CASES["everything"]), PROMPT, GENERATED)
        harness.processed(logits, slot)
        harness.remove(slot)
        params = everything(**CASES[name])
        assert harness.add(params, PROMPT, GENERATED) == slot
        assert_processed(harness.processed(logits, slot), reference(logits.numpy(), params, PROMPT, GENERATED))


def test_long_lists_beside_short_ones() -> None:
    """Tables grow while other slots hold rows in them."""
    harness = Harness()
    small = everything(logit_bias={3: 1.0}, allowed_token_ids=[3, 4], min_tokens=1, stop_token_ids=[4])
    large = everything(logit_bias={i: i / 10 for i in range(90)}, allowed_token_ids=list(range(150)))
    slots = [harness.add(small), harness.add(large), harness.add(small)]
    logits = random_logits(3, seed=2)
    output = harness.step(logits, slots)

    for row, params in enumerate((small, large, small)):
        expected = reference(logits[row].numpy(), params, [3, 4, 5], [])
        assert_processed(dense_logits(output, row, VOCAB), expected)


def test_nothing_runs_that_no_row_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    harness = Harness()
    sampler = harness.sampler
    for name in (
        "apply_min_p",
        "apply_top_k",
        "compute_topk_logprobs",
        "greedy_readings",
    ):
        count(sampler_module, name)
    count(sampler_module, "_float32_copy")
    for name in ("keep_top_p_", "draw"):
        count(sampler.vocab, name)
    count(sampler.penalties, "apply")
    for name in ("_apply_allowed", "_apply_bias", "_apply_min_tokens"):
        count(sampler.logit_bias, name)

    def run(*params: SamplingParams) -> set[str]:
        calls.clear()
        slots = [harness.add(each) for each in params]
        harness.step(random_logits(len(slots)), slots)
        for slot in slots:
            harness.remove(slot)
        return set(calls)

    always = {"_float32_copy", "draw"}
    assert run(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)) == set()
    assert run(SamplingParams(temperature=0, logprobs=2)) == {"greedy_readings"}
    assert run(SamplingParams(temperature=0, logprob_token_ids=[1])) == {"greedy_readings"}
    assert run(SamplingParams()) == always
    assert run(SamplingParams(top_k=3, top_p=0.5)) == always | {"apply_top_k"}
    assert run(SamplingParams(top_p=0.5), SamplingParams(temperature=0)) == always | {"keep_top_p_"}
    assert run(SamplingParams(min_p=0.5)) == always | {"apply_min_p"}
    assert run(SamplingParams(temperature=0, presence_penalty=1.0)) == always | {"apply"}
    assert run(SamplingParams(logit_bias={1: 1.0})) == always | {"_apply_bias"}
    assert run(SamplingParams(temperature=0, allowed_token_ids=[1])) == always | {"_apply_allowed"}
    assert run(SamplingParams(temperature=0, min_tokens=1)) == always | {"_apply_min_tokens"}
    assert run(SamplingParams(logprobs=3)) == always | {"compute_topk_logprobs"}

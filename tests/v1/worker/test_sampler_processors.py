"""Custom processors, callables of requests and bad words in the sampler: order, readings, cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_harness import EOS, VOCAB, Custom, Harness, dense_logits, everything, random_logits

from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import sampler as sampler_module

GREEDY = {"temperature": 0}
PROMPT, GENERATED = [3, 4, 5], [10, 11, 10]


class CustomCopy(Custom):
    """The same in a new tensor."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return super().apply(logits.clone())


class Invariant(Custom):
    """Says that it leaves the most likely token alone; that it does not shows where it acts."""

    invariant = True


def custom_reference(x: np.ndarray, shift: float) -> np.ndarray:
    x = x.copy()
    x[1::2] += shift
    x[::2] *= 0.5
    return x


def reference(logits: torch.Tensor, params: SamplingParams, *, invariant: bool = False) -> np.ndarray:
    """float64 [V]: a row processed in the documented order, one step at a time."""
    x = logits.double().numpy().copy()
    if params.allowed_token_ids:
        x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(GENERATED) < params.min_tokens:
        x[[*EOS]] = -np.inf
    for sequence in params.bad_words_token_ids or []:
        head = sequence[:-1]
        if GENERATED[len(GENERATED) - len(head) :] == head:
            x[sequence[-1]] = -np.inf
    for processor in params.logits_processors or []:
        x = processor(GENERATED, torch.from_numpy(x)).numpy()
    shift = (params.extra_args or {}).get("shift")
    if shift is not None and not invariant:
        x = custom_reference(x, shift)
    for token in range(VOCAB):
        if token in PROMPT or token in GENERATED:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.presence_penalty * (token in GENERATED)
    if params.is_greedy:
        return x
    x /= params.temperature
    if params.min_p > 0:
        x[np.exp(x - x.max()) < params.min_p] = -np.inf
    if shift is not None and invariant:
        x = custom_reference(x, shift)
    if 0 < params.top_k < VOCAB:
        x[np.argsort(-x, kind="stable")[params.top_k :]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        probs = np.exp(x[order] - x.max())
        probs /= probs.sum()
        x[order[1:][(np.cumsum(probs) - probs)[1:] >= params.top_p]] = -np.inf
    return x


def with_bad_words(params: SamplingParams, sequences: list[list[int]]) -> SamplingParams:
    params.bad_words_token_ids = sequences
    return params


def add_three(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    result[::3] += 3
    return result


CASES: dict[str, dict] = {
    "custom": {"extra_args": {"shift": 2.5}},
    "custom greedy": {"extra_args": {"shift": 2.5}, **GREEDY},
    "not its request": {"extra_args": {"other": 1}},
    "callable": {"logits_processors": [add_three]},
    "two callables": {"logits_processors": [add_three, lambda o, x: x * 0.5]},
    "callable then custom": {"logits_processors": [add_three], "extra_args": {"shift": -1.0}},
    "bias before, penalty after": {
        "logit_bias": {10: 4.0, 11: -2.0},
        "extra_args": {"shift": 1.5},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
    },
    "temperature after": {"temperature": 0.5, "extra_args": {"shift": 1.5}},
    "min_p": {"temperature": 0.7, "min_p": 0.02, "extra_args": {"shift": 1.5}},
    "top_k": {"temperature": 1.4, "top_k": 20, "extra_args": {"shift": 1.5}},
    "top_p": {"temperature": 1.4, "top_p": 0.8, "extra_args": {"shift": 1.5}},
    "all": {
        "allowed_token_ids": list(range(150)),
        "logit_bias": {20: 2.0, 21: 3.0},
        "min_tokens": 5,
        "logits_processors": [add_three],
        "extra_args": {"shift": 0.8},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "temperature": 1.6,
        "min_p": 0.01,
        "top_k": 40,
        "top_p": 0.9,
    },
}


def assert_processed(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


# -- order and readings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Custom, CustomCopy, Invariant])
@pytest.mark.parametrize("name", CASES)
def test_order(cls: type[Custom], name: str) -> None:
    harness = Harness(logits_processors=(cls,))
    params = with_bad_words(everything(**CASES[name]), [[33], [10, 34], [9, 35]] if name == "all" else [])
    logits = random_logits(1, seed=len(name))
    before = logits.clone()
    slot = harness.add(params, PROMPT, GENERATED)
    expected = reference(logits[0], params, invariant=cls.invariant)
    assert_processed(harness.processed(logits[0], slot), expected)
    assert torch.equal(logits, before), "the model's logits are left alone"


@pytest.mark.parametrize("cls", [Custom, CustomCopy, Invariant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_in_any_order(cls: type[Custom], dtype: torch.dtype) -> None:
    """Rows in an order that is not the batch's, some of them not there: each is processed as if alone."""
    harness = Harness(logits_processors=(cls,))
    params = [everything(**CASES[name], seed=1) for name in CASES] + [everything(**GREEDY)]
    slots = [harness.add(each, PROMPT, GENERATED) for each in params]
    logits = random_logits(len(params), seed=3).to(dtype)
    harness.step(logits, slots)
    order = [7, 2, 12, 0, 9, 4, 11, 1]
    output = harness.step(logits[order], [slots[i] for i in order])
    assert output.errors() == {}
    for row, i in enumerate(order):
        expected = reference(logits[i].float(), params[i], invariant=cls.invariant)
        assert_processed(dense_logits(output, row, VOCAB), expected)


@pytest.mark.parametrize("cls", [Custom, CustomCopy])
@pytest.mark.parametrize("mode", ["raw_logits", "raw_logprobs"])
def test_raw_readings_are_of_the_models_logits(cls: type[Custom], mode: str) -> None:
    harness = Harness(logits_processors=(cls,))
    logits = random_logits(2, seed=4)
    slots = [
        harness.add(SamplingParams(logprobs=-1, logprobs_mode=mode, extra_args={"shift": 60.0}, **each))
        for each in (GREEDY, {"seed": 1})
    ]
    output = harness.step(logits, slots)
    for row in range(2):
        np.testing.assert_array_equal(dense_logits(output, row, VOCAB), logits[row].numpy())
    assert (output.sampled_token_ids % 2 == 1).all(), "but the draw is from what the processor made of them"


def test_rows_are_at_their_indices_in_float32() -> None:
    harness = Harness(logits_processors=(Custom,))
    slots = [harness.add(SamplingParams(**GREEDY)) for _ in range(4)]
    logits = random_logits(4).to(torch.bfloat16)
    harness.step(logits[[2, 0, 1]], [slots[2], slots[0], slots[1]])
    harness.step(logits[[3, 1]], [slots[3], slots[1]])
    first, second = Custom.seen
    assert torch.equal(first, logits[[2, 0, 1]].float())
    assert second.dtype == torch.float32 and second.shape == (4, VOCAB)
    assert torch.equal(second[[3, 2]], logits[[3, 1]].float()), "those that do not sample keep their index"


def test_argmax_invariant_ones_leave_greedy_requests_alone() -> None:
    harness = Harness(logits_processors=(Invariant,))
    shift = {"extra_args": {"shift": 60.0}}
    greedy = [harness.add(everything(**GREEDY, **shift)) for _ in range(2)]
    logits = random_logits(3, seed=6)
    output = harness.step(logits[:2], greedy)
    assert Invariant.seen == [], "all are greedy"
    assert output.sampled_token_ids.tolist() == logits[:2].argmax(dim=1).tolist()
    output = harness.step(logits, [*greedy, harness.add(everything(seed=1, **shift))])
    (seen,) = Invariant.seen
    assert torch.equal(seen, logits)
    assert output.sampled_token_ids[:2].tolist() == logits[:2].argmax(dim=1).tolist()
    assert output.sampled_token_ids[2] % 2 == 1
    for row in range(2):
        np.testing.assert_array_equal(dense_logits(output, row, VOCAB), logits[row].numpy())


def test_argmax_invariant_ones_are_skipped_beside_others_too() -> None:
    harness = Harness(logits_processors=(Invariant, Custom))
    harness.step(random_logits(2), [harness.add(SamplingParams(**GREEDY)) for _ in range(2)])
    assert len(Custom.seen) == 1 and Invariant.seen == []


def test_argmax_invariant_ones_see_logits_over_the_temperature() -> None:
    harness = Harness(logits_processors=(Invariant,))
    logits = random_logits(2)
    harness.step(logits, [harness.add(SamplingParams(temperature=0.5)), harness.add(SamplingParams(**GREEDY))])
    (seen,) = Invariant.seen
    assert torch.equal(seen, torch.stack([logits[0] / 0.5, logits[1]]))


def test_a_result_of_lower_precision_is_accepted() -> None:
    class Half(Custom):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.to(torch.bfloat16)

    harness = Harness(logits_processors=(Half,))
    logits = random_logits(1)[0]
    actual = harness.processed(logits, harness.add(everything(**GREEDY)))
    np.testing.assert_array_equal(actual, logits.bfloat16().float().numpy())


def test_several_processors_run_in_their_order() -> None:
    class Square(Custom):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.square()

    logits = random_logits(1, seed=8)[0]
    harness = Harness(logits_processors=(Square, Custom))
    actual = harness.processed(logits, harness.add(everything(extra_args={"shift": 2.0}, **GREEDY)))
    assert_processed(actual, custom_reference(logits.double().numpy() ** 2, 2.0))


# -- callables of a request ----------------------------------------------------------------------------------


def test_the_three_forms_and_the_live_lists() -> None:
    calls: list[tuple] = []

    def one(logits: torch.Tensor) -> torch.Tensor:
        calls.append((tuple(logits.shape),))
        return logits + 1

    def two(output_ids: list[int], logits: torch.Tensor) -> None:
        calls.append((list(output_ids), tuple(logits.shape)))
        logits[0] += 5

    def three(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((list(prompt_ids), list(output_ids), tuple(logits.shape)))
        return logits * 2

    harness = Harness()
    slot = harness.add(everything(logits_processors=[one, two, three], **GREEDY), [7, 8], [9])
    logits = random_logits(1, seed=2)[0]
    expected = logits.numpy() + 1
    expected[0] += 5
    np.testing.assert_allclose(harness.processed(logits, slot), expected * 2, rtol=1e-6)
    harness.states.append_sampled(np.array([slot]), np.array([55]))
    harness.processed(logits, slot)
    assert calls == [
        ((1, VOCAB),),
        ([9], (VOCAB,)),
        ([7, 8], [9], (VOCAB,)),
        ((1, VOCAB),),
        ([9, 55], (VOCAB,)),
        ([7, 8], [9, 55], (VOCAB,)),
    ]


def test_callables_end_with_their_request() -> None:
    harness = Harness()
    logits = random_logits(1, seed=2)[0]
    slot = harness.add(everything(logits_processors=[add_three], **GREEDY))
    assert not np.array_equal(harness.processed(logits, slot), logits.numpy())
    harness.remove(slot)
    assert harness.add(everything(**GREEDY)) == slot
    np.testing.assert_array_equal(harness.processed(logits, slot), logits.numpy())
    harness.remove(slot)
    assert harness.add(everything(logits_processors=[lambda o, x: x + len(o)], **GREEDY), [1], [2, 3]) == slot
    np.testing.assert_array_equal(harness.processed(logits, slot), logits.numpy() + 2)


# -- bad words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "generated", "banned"),
    [
        ([[7]], [], [7]),
        ([[7], [9]], [1, 2], [7, 9]),
        ([[1, 2]], [], []),
        ([[1, 2]], [1], [2]),
        ([[1, 2]], [1, 5], []),
        ([[1, 2]], [5, 1], [2]),
        ([[1, 2, 3]], [2], []),
        ([[1, 2, 3]], [], []),
        ([[1, 2, 3]], [1, 2], [3]),
        ([[1, 2, 3]], [0, 1, 2], [3]),
        ([[1, 2, 3]], [1, 2, 3], []),
        ([[1, 1, 1]], [1, 1, 1, 1], [1]),
        ([[7], [1, 2], [4, 1, 3], [5, 4, 1, 6], [8, 8, 1, 9]], [5, 4, 1], [7, 2, 3, 6]),
        ([[0, 3]], [0], [3]),
        ([[0, 0, 3]], [0], []),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, {}], ids=["greedy", "random"])
def test_bad_words(sequences: list, generated: list, banned: list, params: dict) -> None:
    harness = Harness()
    # The prompt ends like a sequence's beginning, which does not count.
    bad = harness.add(with_bad_words(everything(**params), sequences), [1, 2], generated)
    other = harness.add(everything(**params), [1], generated)
    logits = random_logits(2, seed=5)
    output = harness.step(logits, [other, bad])
    expected = logits[1].numpy().copy()
    expected[banned] = -np.inf
    np.testing.assert_array_equal(dense_logits(output, 1, VOCAB), expected)
    np.testing.assert_array_equal(dense_logits(output, 0, VOCAB), logits[0].numpy())


def test_bad_words_end_with_their_request() -> None:
    harness = Harness()
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 9]] = torch.tensor([5.0, 3.0])
    slot = harness.add(with_bad_words(SamplingParams(**GREEDY), [[4]]))
    assert harness.step(logits, [slot]).sampled_token_ids.tolist() == [9]
    harness.remove(slot)
    assert harness.add(SamplingParams(**GREEDY)) == slot
    assert harness.step(logits, [slot]).sampled_token_ids.tolist() == [4]


def test_bad_words_may_rule_out_everything() -> None:
    harness = Harness()
    impossible = with_bad_words(SamplingParams(allowed_token_ids=[4]), [[4]])
    errors = harness.step(random_logits(2), [harness.add(SamplingParams()), harness.add(impossible)]).errors()
    assert list(errors) == [1] and "bad_words" in errors[1]


# -- cost ----------------------------------------------------------------------------------------------------


def test_only_rows_with_callables_or_bad_words_leave_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    original = sampler_module._float32_copy

    def counted(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        copied.extend(rows.tolist())
        return original(logits, rows)

    monkeypatch.setattr(sampler_module, "_float32_copy", counted)
    harness = Harness()
    slots = [
        harness.add(SamplingParams(**GREEDY)),
        harness.add(SamplingParams(logits_processors=[add_three], **GREEDY)),
        harness.add(SamplingParams(logprobs=1, **GREEDY)),
        harness.add(with_bad_words(SamplingParams(**GREEDY), [[4]])),
    ]
    harness.step(random_logits(4), slots)
    assert copied == [1, 3]
    for slot in (slots[1], slots[3]):
        harness.remove(slot)
    harness.step(random_logits(2), [slots[0], slots[2]])
    assert copied == [1, 3]
    assert not harness.sampler.bad_words.in_use and not harness.sampler.request_processors.in_use


# -- entropy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_read_where_it_is_asked_for(dtype: torch.dtype) -> None:
    params = [
        SamplingParams(logprobs=2, logprob_entropy=True, **GREEDY),
        SamplingParams(logprobs=2, **GREEDY),
        SamplingParams(logprob_token_ids=[3], logprob_entropy=True, seed=1),
        SamplingParams(logprobs=2, seed=1),
        SamplingParams(logprob_entropy=True, logprobs_mode="processed_logprobs", temperature=0.5, top_k=9),
        SamplingParams(logprobs=1, logprobs_mode="processed_logprobs", temperature=0.5),
        SamplingParams(**GREEDY),
    ]
    logits = random_logits(len(params), seed=11).to(dtype)
    harness = Harness()
    output = harness.step(logits, [harness.add(each) for each in params])
    found: dict[int, float | None] = {}
    for rows, tensors in output.logprobs:
        entropy = [None] * len(rows) if tensors.entropy is None else tensors.entropy.tolist()
        found.update(zip(rows, entropy, strict=True))
    x = logits.double()
    kept = (x[4] / 0.5).topk(9).values
    for row, values in ((0, x[0]), (2, x[2]), (4, kept)):
        expected = torch.distributions.Categorical(logits=values).entropy().item()
        assert found.pop(row) == pytest.approx(expected, abs=1e-5)
    assert found == dict.fromkeys((1, 3, 5))

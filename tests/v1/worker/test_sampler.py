"""Draws, seeds, readings and errors of a mixed batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_harness import MAX_NUM_REQS, VOCAB, Harness, dense_logits, everything, random_logits, reading

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import sampler as sampler_module

GREEDY = {"temperature": 0}


@pytest.fixture(autouse=True)
def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "device", torch.device(device))


def true_readings(logits: torch.Tensor, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """float64 logprobs and ranks of some ids in a float row [V]."""
    x = logits.double().numpy()
    lse = np.log(np.exp(x - x.max()).sum()) + x.max()
    return x[token_ids] - lse, np.array([1 + (x > x[token]).sum() for token in token_ids])


# -- draws ---------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    vocab_size, steps = 12, 250
    harness = Harness(vocab_size, max_model_len=steps + 8)
    row = random_logits(1, vocab_size, seed=4, scale=1.5)
    slots = [
        harness.add(SamplingParams(temperature=1.3, top_k=9, seed=seed, logit_bias={2: 1.0}), [1])
        for seed in range(MAX_NUM_REQS)
    ]
    counts = np.zeros(vocab_size)
    for _ in range(steps):
        tokens = harness.step(row.expand(len(slots), -1), slots).sampled_token_ids.numpy()
        counts += np.bincount(tokens, minlength=vocab_size)
        harness.states.append_sampled(np.array(slots), tokens)
    x = row[0].double().numpy().copy()
    x[2] += 1.0
    x /= 1.3
    x[np.argsort(-x)[9:]] = -np.inf
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    assert (counts[probs == 0] == 0).all()
    draws = steps * len(slots)
    error = np.abs(counts / draws - probs)
    assert (error < 4 * np.sqrt(probs * (1 - probs) / draws) + 1e-9).all(), "four standard deviations"


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, [60, 20, 90]] = 5.0
    harness = Harness()
    slots = [
        harness.add(SamplingParams(**GREEDY)),
        harness.add(SamplingParams(logprobs=1, **GREEDY)),
        harness.add(SamplingParams(logit_bias={3: 0.5}, **GREEDY)),
        harness.add(SamplingParams(temperature=0.0, logprob_token_ids=[3])),
    ]
    assert harness.step(logits, slots).sampled_token_ids.tolist() == [20] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_left_as_they_were(dtype: torch.dtype) -> None:
    harness = Harness()
    params = [
        SamplingParams(top_p=0.5, presence_penalty=1.0),
        SamplingParams(**GREEDY),
        everything(min_p=0.2),
    ]
    logits = random_logits(3).to(dtype)
    before = logits.clone()
    output = harness.step(logits, [harness.add(each) for each in params])
    assert torch.equal(logits, before)
    assert output.sampled_token_ids.dtype == torch.int32
    assert output.sampled_token_ids[1] == before[1].argmax()


# -- seeds ---------------------------------------------------------------------------------------------------


def generate(harness: Harness, slots: list[int], steps: int) -> np.ndarray:
    """int32 [steps, rows]: tokens of a toy model whose logits depend on the last token alone."""
    table = random_logits(VOCAB, seed=77, scale=1.0)
    tokens = []
    for _ in range(steps):
        rows = np.array(slots)
        last = harness.states.token_ids[rows, harness.states.total_len[rows] - 1]
        sampled = harness.step(table[torch.from_numpy(last.astype(np.int64))], slots).sampled_token_ids.numpy()
        harness.states.append_sampled(rows, sampled)
        tokens.append(sampled)
    return np.stack(tokens)


def test_a_seed_gives_one_stream_whatever_the_company() -> None:
    alone = Harness(seed=1)
    expected = generate(alone, [alone.add(SamplingParams(seed=42))], 12)[:, 0]
    crowded = Harness(seed=2)
    others = [crowded.add(SamplingParams(top_k=5 + i, temperature=0.5 + i)) for i in range(5)]
    slot = crowded.add(SamplingParams(seed=42))
    np.testing.assert_array_equal(generate(crowded, [*others[:3], slot, *others[3:]], 12)[:, 3], expected)


def test_a_preempted_request_goes_on_with_its_stream() -> None:
    for params in (SamplingParams(seed=-5), SamplingParams()):
        whole = Harness()
        expected = generate(whole, [whole.add(params, [8], request_id="a")], 10)[:, 0].tolist()
        broken = Harness()
        slot = broken.add(params, [8], request_id="a")
        first = generate(broken, [slot], 4)[:, 0].tolist()
        broken.remove(slot)
        broken.add(SamplingParams(), [1], request_id="b")
        slot = broken.add(params, [8], first, request_id="a")
        assert first + generate(broken, [slot], 6)[:, 0].tolist() == expected


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them() -> None:
    def run(engine_seed: int, names: list[str | None]) -> np.ndarray:
        harness = Harness(seed=engine_seed)
        return generate(harness, [harness.add(SamplingParams(), request_id=name) for name in names], 8)

    for names in ([None] * 4, ["0", "1", "2", "3"]):
        first = run(5, names)
        assert len({tuple(column) for column in first.T}) == 4
        np.testing.assert_array_equal(first, run(5, names))
        assert not np.array_equal(first, run(6, names))
    np.testing.assert_array_equal(run(5, ["0", "1"])[:, ::-1], run(5, ["1", "0"]))


# -- readings ------------------------------------------------------------------------------------------------

READERS: list[dict] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logprob_token_ids": [5, 9, 100]},
    {"temperature": 0, "logprobs": 2, "logprob_token_ids": [7]},
    {"temperature": 0, "logprobs": -1},
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0, "logprob_token_ids": [11, 3], "logprobs_mode": "processed_logprobs"},
    {"temperature": 0, "logprobs": 2, "presence_penalty": 1.0},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.9, "logprobs_mode": "processed_logprobs"},
    {"seed": 1},
    {"seed": 2, "logprobs": 4},
    {"seed": 3, "logprob_token_ids": [198, 0]},
    {"seed": 4, "logprobs": 100, "logprob_token_ids": [1, 2, 3, 4, 5, 6]},
    {"seed": 5, "logprobs": 5, "top_k": 3, "logprobs_mode": "processed_logprobs"},
    {"seed": 6, "logprobs": 5, "top_p": 0.7, "logprobs_mode": "processed_logits"},
    {"seed": 7, "logprob_token_ids": list(range(150)), "temperature": 0.4, "logprobs_mode": "raw_logits"},
    {"seed": 8, "logprobs": 1, "temperature": 3.0, "logprobs_mode": "processed_logprobs"},
]


def own_reading(output: object, row: int, params: SamplingParams) -> dict[str, np.ndarray] | None:
    num_topk = VOCAB if params.logprobs == -1 else params.logprobs or 0
    return reading(output, row, num_topk, len(params.logprob_token_ids or ()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_readings_equal_those_alone(dtype: torch.dtype) -> None:
    params = [SamplingParams(**each) for each in READERS]
    logits = random_logits(len(params), seed=8).to(dtype)
    # The order is shuffled, so that groups are made of scattered rows.
    order = np.random.default_rng(0).permutation(len(params)).tolist()
    harness = Harness()
    slots = [harness.add(each, generated=[6, 6]) for each in params]
    together = harness.step(logits[order], [slots[i] for i in order])
    assert together.errors() == {}
    for row, i in enumerate(order):
        alone_harness = Harness()
        alone = alone_harness.step(logits[i : i + 1], [alone_harness.add(params[i], generated=[6, 6])])
        assert together.sampled_token_ids[row] == alone.sampled_token_ids[0]
        mixed, single = own_reading(together, row, params[i]), own_reading(alone, 0, params[i])
        if params[i].num_logprobs is None:
            assert mixed is None and single is None
            continue
        assert mixed is not None and single is not None
        assert mixed["token_ids"][0] == together.sampled_token_ids[row]
        for name, values in mixed.items():
            np.testing.assert_allclose(values, single[name], rtol=0, atol=1e-6, err_msg=f"{name} of {READERS[i]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readings_are_true(dtype: torch.dtype) -> None:
    params = [SamplingParams(**each) for each in READERS]
    logits = random_logits(len(params), seed=9).to(dtype)
    harness = Harness()
    output = harness.step(logits, [harness.add(each) for each in params])
    for row, each in enumerate(params):
        found = own_reading(output, row, each)
        if found is None or (each.logprobs_mode or "").startswith("processed"):
            continue
        token_ids = found["token_ids"].tolist()
        top_k = VOCAB if each.logprobs == -1 else each.logprobs or 0
        assert token_ids[1 + top_k :] == (each.logprob_token_ids or [])
        by_rank = torch.sort(logits[row].float(), descending=True, stable=True).indices.tolist()
        assert token_ids[1 : 1 + top_k] == by_rank[:top_k]
        logprobs, ranks = true_readings(logits[row].float(), token_ids)
        np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5)
        np.testing.assert_array_equal(found["ranks"], ranks)
        np.testing.assert_array_equal(found["logits"], logits[row].float().numpy()[token_ids])


def test_processed_readings_are_of_the_processed_logits() -> None:
    logits = random_logits(1, seed=10)
    full = dict(seed=1, temperature=0.7, top_k=4, presence_penalty=0.5)
    harness = Harness()
    dense = harness.processed(logits[0], harness.add(everything(**full), generated=[5]))
    params = SamplingParams(logprobs=6, logprob_token_ids=[0, 1], logprobs_mode="processed_logprobs", **full)
    found = own_reading(harness.step(logits, [harness.add(params, generated=[5])]), 0, params)
    assert found is not None
    kept = np.sort(dense[np.isfinite(dense)])[::-1].astype(np.float64)
    expected = kept - np.log(np.exp(kept).sum())
    np.testing.assert_allclose(found["logprobs"][1:5], expected, atol=1e-5)
    assert np.isneginf(found["logprobs"][5:7]).all(), "what was cut has no probability"


def test_wide_rows_are_read_apart() -> None:
    """A row that wants the vocabulary must not make its neighbours' readings as wide."""
    harness = Harness()
    params = [
        SamplingParams(logprobs=-1),
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=1),
    ]
    params += [SamplingParams(logprobs=-1, **GREEDY), SamplingParams(logprob_token_ids=[1, 2], **GREEDY)]
    params += [SamplingParams(logprob_token_ids=list(range(140)), **GREEDY)]
    output = harness.step(random_logits(len(params)), [harness.add(each) for each in params])
    widths = {tuple(rows): tensors.logprobs.shape[1] for rows, tensors in output.logprobs}
    assert set(widths) == {(0,), (1, 3), (4,), (5,), (6,)}
    assert widths[(1, 3)] == 3
    assert widths[(5,)] == 3


def test_greedy_readings_take_no_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    original = sampler_module.greedy_readings

    def watch(logits: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(logits)
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(sampler_module, "greedy_readings", watch)
    harness = Harness()
    logits = random_logits(8).to(harness.device, torch.bfloat16)
    slots = [harness.add(SamplingParams(logprob_token_ids=[1, 2, 3 + i], **GREEDY)) for i in range(8)]
    harness.step(logits, slots)
    assert [each.data_ptr() for each in seen] == [logits.data_ptr()]
    assert seen[0].dtype == torch.bfloat16


def test_slot_reuse_changes_what_is_read() -> None:
    logits = random_logits(1, seed=13)
    for before in READERS:
        for after in READERS[:6]:
            harness = Harness()
            slot = harness.add(SamplingParams(**before))
            harness.step(logits, [slot])
            harness.remove(slot)
            params = SamplingParams(**after)
            assert harness.add(params) == slot
            output = harness.step(logits, [slot])
            assert output.sampled_token_ids.tolist() == [int(logits.argmax())]
            found = own_reading(output, 0, params)
            assert (found is None) == (params.num_logprobs is None)
            if found is not None and params.logprobs is None:
                assert output.logprobs[0][1].logprobs.shape[1] == 1 + len(params.logprob_token_ids or ())


def test_a_full_house_in_any_order() -> None:
    params = [SamplingParams(**READERS[i % len(READERS)]) for i in range(MAX_NUM_REQS)]
    logits = random_logits(MAX_NUM_REQS, seed=14)
    harness = Harness()
    slots = [harness.add(each) for each in params]
    forward = harness.step(logits, slots).sampled_token_ids
    backward = harness.step(logits.flip(0), slots[::-1]).sampled_token_ids
    assert torch.equal(forward, backward.flip(0))


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", READERS, ids=str)
def test_unsound_logits_break_their_own_row_only(params: dict, bad: float) -> None:
    harness = Harness()
    logits = random_logits(3, seed=15)
    logits[1, 120] = bad
    slots = [harness.add(SamplingParams(**params)) for _ in range(3)]
    output = harness.step(logits, slots)
    assert list(output.errors()) == [1]
    assert "not finite" in output.errors()[1]
    clean = Harness()
    expected = clean.step(logits[[0, 2]], [clean.add(SamplingParams(**params)) for _ in range(2)])
    assert output.sampled_token_ids[[0, 2]].tolist() == expected.sampled_token_ids.tolist()


def test_nan_among_the_forbidden_tokens_is_still_an_error() -> None:
    harness = Harness()
    logits = random_logits(1)
    logits[0, 120] = float("nan")
    assert list(harness.step(logits, [harness.add(SamplingParams(allowed_token_ids=[4, 5]))]).errors()) == [0]


def test_nothing_left_to_sample_is_an_error_of_its_own() -> None:
    harness = Harness()
    impossible = SamplingParams(allowed_token_ids=[2, 7], min_tokens=1)
    output = harness.step(random_logits(2), [harness.add(impossible), harness.add(SamplingParams())])
    assert list(output.errors()) == [0]
    assert "rule out every one" in output.errors()[0]


def test_masked_model_logits_are_sound() -> None:
    """Some models give -inf to vocabulary padding; that is no error, whatever the processing."""
    harness = Harness()
    logits = random_logits(len(READERS), seed=16)
    logits[:, 150:] = -torch.inf
    output = harness.step(logits, [harness.add(SamplingParams(**each)) for each in READERS])
    assert output.errors() == {}
    assert (output.sampled_token_ids < 150).all()
    assert np.isneginf(dense_logits(output, 4, VOCAB)[150:]).all()

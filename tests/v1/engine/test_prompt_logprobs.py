"""Prompt readings: right for every way a prompt is computed, cached, interrupted; within a bound of memory."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from models_util import hf_logits, make_random_model, random_prompts
from readings_reference import LOGPROB_TOLERANCE, TIE_DISTANCE, assert_same_prompts
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import worker
from vllm.v1.features.hidden_cache.runner import HiddenCache
from vllm.v1.worker.gpu.sample import prompt_logprob

LENGTHS = (1, 16, 5, 37, 2, 50, 33)


@pytest.fixture(scope="module")
def tiny_on_device(folder, device):
    return make_tiny_llm(folder, device=device, cache_hidden_states=True)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def mixed_params(prompts: list[list[int]]) -> list[SamplingParams]:
    """One request of every kind a prompt."""
    lists = [[(3 * row) % 50, 7, *range(row % 3)] for row in range(len(prompts[3]) - 1)]
    return [
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        SamplingParams(max_tokens=0, prompt_logprobs=3, prompt_logprob_token_ids=[5, 9, 11]),
        SamplingParams(max_tokens=2, seed=1, prompt_logprobs=-1),
        SamplingParams(max_tokens=0, prompt_logprob_token_ids=lists, logprob_token_ids=[1, 2]),
        SamplingParams(max_tokens=1, prompt_logprobs=2, logprob_entropy=True),
        SamplingParams(max_tokens=3, temperature=0, prompt_logprob_token_ids=range(40), prompt_logprob_start=17),
        SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=2, logprob_token_ids=[3]),
    ]


def assert_prompt_matches(output, params, logits: np.ndarray) -> None:
    """Every entry that was asked for is there with the right logprob, logit and rank; `logits` float64 [P, V]."""
    tokens, readings = output.prompt_token_ids, output.prompt_logprobs
    start = params.prompt_logprob_start or 0
    assert len(readings) == max(len(tokens), start + 1)
    assert all(readings[position] is None for position in range(start + 1))
    for position in range(start + 1, len(tokens)):
        row, entries = logits[position - 1], readings[position]
        lse = row.max() + np.log(np.exp(row - row.max()).sum())
        assert next(iter(entries)) == tokens[position]
        asked = params.prompt_token_ids_of(position - 1)
        assert set(asked) <= set(entries)
        num_topk = len(row) if params.prompt_logprobs == -1 else (params.prompt_logprobs or 0)
        if num_topk == 0:
            assert list(entries) == list(dict.fromkeys([tokens[position], *asked]))
        assert len(entries) <= 1 + num_topk + len(asked)
        threshold = np.sort(row)[-num_topk] if num_topk else np.inf
        assert sum(row[token] >= threshold - TIE_DISTANCE for token in entries) >= num_topk
        for token, entry in entries.items():
            assert abs(entry.logprob - (row[token] - lse)) < LOGPROB_TOLERANCE
            assert abs(entry.logit - row[token]) < LOGPROB_TOLERANCE
            others = np.delete(row, token)
            best, worst = ((others > row[token] + sign * TIE_DISTANCE).sum() for sign in (1, -1))
            assert 1 + best <= entry.rank <= 1 + worst
        if params.logprob_entropy:
            probs = np.exp(row - lse)
            assert entries.entropy == pytest.approx(-(probs * np.log(probs)).sum(), abs=1e-4)
        else:
            assert entries.entropy is None


def assert_next_matches(output, params, logits: np.ndarray) -> None:
    """With max_tokens=0 the next position has what was asked for, and no sampled token."""
    completion = output.outputs[0]
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    if params.num_logprobs is None:
        assert completion.logprobs is None
        return
    (entries,) = completion.logprobs
    row = logits[-1]
    top = np.argsort(-row)[: params.logprobs or 0].tolist()
    assert list(entries) == list(dict.fromkeys([*top, *(params.logprob_token_ids or [])]))
    expected = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token], abs=LOGPROB_TOLERANCE)
        assert entry.rank == 1 + (row > row[token]).sum()
    assert completion.cumulative_logprob == 0


@pytest.mark.parametrize("arch", ["llama", "qwen3", "opt"])
def test_equal_to_transformers_with_any_chunk_size_cold_and_cached(arch, tmp_path, device):
    folder, model = make_random_model(arch, "odd", tmp_path)
    prompts = random_prompts(model.config.vocab_size, LENGTHS)
    prompts[-1] = prompts[-2][:33] + prompts[-1]
    params = mixed_params(prompts)
    expected = [logits.double().numpy() for logits in hf_logits(model, prompts)]
    seen: dict[int, list] = {}
    for chunk in (1, 7, 64, None):
        llm = LLM(
            str(folder),
            device=device,
            dtype="float32",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.3,
            max_logprobs=-1,
            max_num_batched_tokens=chunk,
        )
        for cache in ("cold", "cached"):
            for index, output in enumerate(generate(llm, prompts, params)):
                assert_prompt_matches(output, params[index], expected[index])
                if params[index].max_tokens == 0:
                    assert_next_matches(output, params[index], expected[index])
                if cache == "cached":
                    assert output.num_cached_tokens == (len(prompts[index]) - 1) // 16 * 16
                seen.setdefault(index, []).append(output.prompt_logprobs.logprobs)
    for readings in seen.values():
        for other in readings[1:]:
            np.testing.assert_allclose(readings[0], other, rtol=0, atol=1e-5)


def test_a_prefix_cached_by_requests_that_read_nothing(tiny_on_device, device):
    tiny_on_device.reset_prefix_cache()
    (prompt,) = random_prompts(VOCAB_SIZE, (70,), seed=2)
    plain = SamplingParams(temperature=0, max_tokens=1)
    reads = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (cold,) = generate(tiny_on_device, [prompt], reads)
    tiny_on_device.reset_prefix_cache()
    generate(tiny_on_device, [prompt], plain)
    (recomputed,) = generate(tiny_on_device, [prompt], reads)
    (cached,) = generate(tiny_on_device, [prompt], reads)
    assert [output.num_cached_tokens for output in (cold, recomputed, cached)] == [0, 0, 64]
    assert_same_prompts(recomputed.prompt_logprobs, cold.prompt_logprobs, device)
    assert_same_prompts(cached.prompt_logprobs, recomputed.prompt_logprobs, device)
    # A tail alone needs no more than the tail.
    tiny_on_device.reset_prefix_cache()
    generate(tiny_on_device, [prompt], plain)
    tail = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprob_start=50)
    (output,) = generate(tiny_on_device, [prompt], tail)
    assert output.num_cached_tokens == (50 if device == "cpu" else 48)
    assert_same_prompts(output.prompt_logprobs[51:], cold.prompt_logprobs[51:], device)


def test_preempted_requests_read_each_position_once(folder, device):
    params = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True, prompt_logprobs=2) for i in range(5)]
    prompts = random_prompts(VOCAB_SIZE, (60, 40, 50, 33, 20), seed=3)
    roomy = make_tiny_llm(folder, device=device)
    expected = generate(roomy, prompts, params)
    for budget in (16, None):
        tight = make_tiny_llm(folder, device=device, num_gpu_blocks_override=9, max_num_batched_tokens=budget)
        outputs = generate(tight, prompts, params)
        assert tight.llm_engine.engine_core.scheduler.num_preemptions
        for output, alone in zip(outputs, expected, strict=True):
            assert_same_prompts(output.prompt_logprobs, alone.prompt_logprobs, device)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert is_empty(tight)


def test_without_a_prefix_cache(folder, tiny_on_device, device):
    llm = make_tiny_llm(folder, device=device, enable_prefix_caching=False, max_num_batched_tokens=24)
    prompts = random_prompts(VOCAB_SIZE, LENGTHS, seed=4)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    for output, other in zip(generate(llm, prompts, params), generate(tiny_on_device, prompts, params), strict=True):
        assert_same_prompts(output.prompt_logprobs, other.prompt_logprobs, device)
        assert output.num_cached_tokens == 0


def test_without_hidden_states_beside_the_cache(folder, tiny_on_device, device):
    """Positions that are read are computed each time, what is before them is not."""
    llm = make_tiny_llm(folder, device=device, cache_hidden_states=False)
    tiny_on_device.reset_prefix_cache()
    (prompt,) = random_prompts(VOCAB_SIZE, (70,), seed=2)
    for start, num_cached in ((0, 0), (0, 0), (50, 50 if device == "cpu" else 48)):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprob_start=start)
        (output,), (other,) = (generate(each, [prompt], params) for each in (llm, tiny_on_device))
        assert output.num_cached_tokens == num_cached
        assert_same_prompts(output.prompt_logprobs[start + 1 :], other.prompt_logprobs[start + 1 :], device)
    own = llm.llm_engine.engine_core.executor.worker
    assert own.model_runner.guest(HiddenCache) is None


class TestMemory:
    def test_no_more_rows_of_logits_than_a_tile(self, tiny, monkeypatch):
        """Rows of several requests share tiles, and no tile is larger than the bound."""
        tiny.reset_prefix_cache()
        prompts = random_prompts(VOCAB_SIZE, (60, 3, 3, 50), seed=5)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        expected = generate(tiny, prompts, params)
        model = tiny.llm_engine.engine_core.executor.worker.model_runner.model
        inner, sizes = model.compute_logits, []

        def compute_logits(hidden):
            sizes.append(len(hidden))
            return inner(hidden)

        tiny.reset_prefix_cache()
        monkeypatch.setattr(prompt_logprob, "TILE_BYTES", 4 * VOCAB_SIZE * 10)
        monkeypatch.setattr(model, "compute_logits", compute_logits)
        outputs = generate(tiny, prompts, params)
        assert sizes == [10] * 11 + [2]  # 59 + 2 + 2 + 49 positions; no logits that nobody wants
        for output, other in zip(outputs, expected, strict=True):
            assert output.prompt_logprobs == other.prompt_logprobs

    def test_a_row_larger_than_a_tile(self, monkeypatch):
        monkeypatch.setattr(prompt_logprob, "TILE_BYTES", 1000)
        assert [prompt_logprob.num_tile_rows(size) for size in (1, 250, 251, 10**6)] == [250, 1, 1, 1]

    def test_the_kv_profile_leaves_room(self, folder, monkeypatch):
        """The budget that is left for blocks does not include what logits and kept hidden states take."""
        available = 60 * 2**20
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        monkeypatch.setattr(worker, "available_bytes", lambda: available)
        own = make_tiny_llm(folder).llm_engine.engine_core.executor.worker
        runner = own.model_runner
        assert runner.max_logits_bytes() >= prompt_logprob.TILE_BYTES - 4 * VOCAB_SIZE
        rest = (available - runner.max_logits_bytes()) * worker._CPU_CACHE_FRACTION
        # Keys and values of two layers, two heads of 16, and a hidden state of 64, in float32.
        block_bytes = 16 * 4 * (2 * 2 * 2 * 16 + 64)
        assert runner.kv_caches[0][0].shape[0] == rest // block_bytes


def test_max_tokens_0_with_a_prompt_of_the_whole_context(tiny):
    (prompt,) = random_prompts(VOCAB_SIZE, (128,), seed=6)
    nothing = SamplingParams(max_tokens=0)
    (output,) = generate(tiny, [prompt], nothing)
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == ([], None)
    both = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=1, logprob_token_ids=[4])
    (output,) = generate(tiny, [prompt], both)
    assert len(output.prompt_logprobs) == 128
    assert len(output.outputs[0].logprobs[0]) in (1, 2)
    with pytest.raises(VLLMValidationError, match=r"129 tokens, which is more than max_model_len=128"):
        generate(tiny, [[5] * 129], both)
    with pytest.raises(VLLMValidationError, match="leaves no room for output"):
        generate(tiny, [prompt], SamplingParams(max_tokens=1))


def test_several_samples_share_the_prompts_readings(tiny):
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    (output,) = generate(tiny, [byte_ids("several samples of one prompt")], params)
    assert len(output.outputs) == 3
    (alone,) = generate(tiny, [output.prompt_token_ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert output.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streamed_outputs_bring_the_prompts_readings_whole_and_deltas_bring_them_once(tiny, kind):
    tiny.reset_prefix_cache()
    engine = tiny.llm_engine
    (prompt,) = random_prompts(VOCAB_SIZE, (90,), seed=7)
    params = dict(seed=3, max_tokens=5, ignore_eos=True, prompt_logprobs=1, output_kind=kind)
    # The plain neighbour caches the prompt first: of the two samples, the one that reads comes late.
    engine.add_request("plain", prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add_request("r", prompt, SamplingParams(n=2, **params))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.request_id == "r"]
    with_readings = [output for output in outputs if output.prompt_logprobs is not None]
    assert all(len(output.prompt_logprobs) == 90 for output in with_readings)
    if kind is RequestOutputKind.DELTA:
        assert with_readings == outputs[:1]
        tokens = {0: [], 1: []}
        for output in outputs:
            for completion in output.outputs:
                tokens[completion.index] += completion.token_ids
        assert {len(ids) for ids in tokens.values()} == {5}
    else:
        assert len(with_readings) == len(outputs)
        assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 5)


def test_broken_logits_end_their_request_alone(tiny, monkeypatch):
    prompts = random_prompts(VOCAB_SIZE, (20, 30, 10), seed=8)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    tiny.reset_prefix_cache()
    expected = generate(tiny, prompts, params)
    model = tiny.llm_engine.engine_core.executor.worker.model_runner.model
    inner = model.compute_logits

    def compute_logits(hidden):
        logits = inner(hidden)
        if len(hidden) == 19 + 29 + 9:  # the prompts' positions in one tile
            logits[25, 3] = torch.nan
        return logits

    tiny.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", compute_logits)
        outputs = generate(tiny, prompts, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].request_id in outputs[1].outputs[0].error and "prompt position" in outputs[1].outputs[0].error
    for index in (0, 2):
        assert outputs[index].prompt_logprobs == expected[index].prompt_logprobs
    assert is_empty(tiny)
    assert generate(tiny, prompts, params)[1].prompt_logprobs == expected[1].prompt_logprobs


class TestForms:
    def test_lists_a_position_as_an_array_filled_up_with_minus_one(self, tiny):
        prompt = byte_ids("abcd")
        ragged = [[5], [6, 7], [8]]
        filled = np.array([[5, -1], [6, 7], [8, -1]])
        one, other = generate(
            tiny, [prompt] * 2, [SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids) for ids in (ragged, filled)]
        )
        assert one.prompt_logprobs == other.prompt_logprobs
        assert [set(position) - {token} for position, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)]

    def test_logits_instead_of_logprobs(self, tiny):
        prompt = byte_ids("abcd")
        logprobs, logits = generate(
            tiny,
            [prompt] * 2,
            [SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs_mode=mode) for mode in (None, "raw_logits")],
        )
        for plain, raw in zip(logprobs.prompt_logprobs[1:], logits.prompt_logprobs[1:], strict=True):
            assert list(plain) == list(raw)
            assert all(raw[token].logprob == plain[token].logit for token in raw)

    def test_arrays_slices_and_pickles(self, tiny):
        prompt = byte_ids("abcdefgh")
        params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=[4, 9], prompt_logprob_start=2)
        (output,) = generate(tiny, [prompt], params)
        readings = output.prompt_logprobs
        assert len(readings) == 8 and readings[:3] == [None, None, None]
        assert readings[-1] == readings[7] and readings.num_unread == 3
        table = readings.select([9, 4])
        assert table.logprobs.shape == (5, 2)
        assert table.logprobs[-1].tolist() == [readings[7][9].logprob, readings[7][4].logprob]
        again = pickle.loads(pickle.dumps(output)).prompt_logprobs
        assert again == readings and list(again) == list(readings)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"prompt_logprobs": 0, "prompt_logprob_start": 4},
                "prompt_logprob_start must be below .* 4 tokens, got 4",
            ),
            ({"prompt_logprob_token_ids": [[1], [2]]}, "has 2 lists, but 3 positions"),
            ({"prompt_logprob_token_ids": [[1], [2], [VOCAB_SIZE]]}, r"must be in \[0, 268\)"),
            ({"prompt_logprob_token_ids": range(129)}, "prompt_logprob_token_ids of length 129"),
            ({"prompt_logprobs": 10**6}, "Requested prompt_logprobs of 1000000"),
        ],
    )
    def test_what_does_not_fit_the_prompt(self, tiny, fields, message):
        with pytest.raises(VLLMValidationError, match=message):
            generate(tiny, [byte_ids("abcd")], SamplingParams(max_tokens=0, **fields))

    @pytest.mark.parametrize("ids", [[1.5], [[1.5]], [[1], 2], "12", [True], [-1], [[-2]], {1: 2}, 3])
    def test_bad_ids(self, ids):
        with pytest.raises(VLLMValidationError, match="prompt_logprob_token_ids"):
            SamplingParams(prompt_logprob_token_ids=ids)

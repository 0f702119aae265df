"""The engine's promises: a result depends on its request alone, and what ends leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from models_util import random_prompts
from readings_reference import assert_same_readings
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind


@pytest.fixture(scope="module")
def tiny_on_device(folder, device):
    return make_tiny_llm(folder, device=device)


@pytest.fixture
def engine(tiny):
    yield tiny.llm_engine
    assert is_empty(tiny)


def generate(tiny, prompts, params, **options):
    return tiny.generate(prompts, params, use_tqdm=False, **options)


def run_all(engine) -> dict[str, list]:
    """Step until nothing is left: every output, by request."""
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def texts(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


MIXED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprob_token_ids=[5, 9]),
    SamplingParams(seed=2, max_tokens=12, ignore_eos=True, top_p=0.8, top_k=20, logprobs=0),
    SamplingParams(seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.5, logprobs=1),
    SamplingParams(seed=4, max_tokens=12, ignore_eos=True, min_p=0.05, logit_bias={7: 4.0}, logprobs=2),
    SamplingParams(seed=5, max_tokens=12, ignore_eos=True, allowed_token_ids=range(30, 90), frequency_penalty=1.0),
]


class TestSamples:
    def test_n_samples_are_as_many_seeds(self, tiny_on_device):
        params = SamplingParams(n=4, seed=11, max_tokens=8, ignore_eos=True)
        (output,) = generate(tiny_on_device, ["ab"], params)
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(tokens) for tokens in texts(output)}) == 4
        for index in range(4):
            one = SamplingParams(seed=11 + index, max_tokens=8, ignore_eos=True)
            assert texts(generate(tiny_on_device, ["ab"], one)[0]) == [texts(output)[index]]

    def test_samples_share_their_prompts_blocks(self, tiny):
        tiny.reset_prefix_cache()
        core = tiny.llm_engine.engine_core
        prompt = random_prompts(VOCAB_SIZE, (50,), seed=5)[0]
        tiny.llm_engine.add_request("r", prompt, SamplingParams(n=3, seed=0, max_tokens=2, ignore_eos=True))
        tiny.llm_engine.step()
        tables = [core.scheduler.kv.blocks_of(request.request_id)[0] for request in core.scheduler.running]
        assert len(tables) == 3
        assert tables[0][:3] == tables[1][:3] == tables[2][:3]
        assert len({table[3] for table in tables}) == 3
        run_all(tiny.llm_engine)

    def test_a_seed_needs_no_company(self, tiny_on_device):
        alone = [generate(tiny_on_device, ["the cat"], params)[0] for params in MIXED]
        tiny_on_device.reset_prefix_cache()
        neighbours = random_prompts(VOCAB_SIZE, (3, 40, 17), seed=8)
        others = SamplingParams(max_tokens=5, temperature=1.5)
        together = generate(tiny_on_device, [*neighbours, *["the cat"] * len(MIXED)], [others] * 3 + MIXED)[3:]
        for one, other in zip(alone, together, strict=True):
            assert_same_readings(one, other, 1e-5)

    def test_without_a_seed_every_request_draws_afresh(self, tiny_on_device):
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        outputs = [*generate(tiny_on_device, ["a", "a"], params), *generate(tiny_on_device, ["a"], params)]
        assert len({tuple(texts(output)[0]) for output in outputs}) == 3

    def test_the_engines_seed_makes_a_run_repeatable(self, folder, device):
        params = SamplingParams(n=2, max_tokens=10, ignore_eos=True)
        runs = [
            [texts(output) for output in generate(make_tiny_llm(folder, device=device, seed=seed), ["a", "b"], params)]
            for seed in (5, 5, 6)
        ]
        assert runs[0] == runs[1] != runs[2]

    @pytest.mark.gpu
    def test_a_seed_gives_the_same_tokens_on_every_device(self, folder):
        on_cpu, on_gpu = (
            [
                texts(output)
                for output in generate(make_tiny_llm(folder, device=device), ["the cat"] * len(MIXED), MIXED)
            ]
            for device in ("cpu", "cuda")
        )
        assert on_cpu == on_gpu


class TestEnds:
    def test_abort_frees_everything_at_once(self, engine):
        pool = engine.engine_core.scheduler.kv.pool
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        for name in ("a", "b", "c"):
            engine.add_request(name, [5] * 40, params)
        engine.add_request("several", [6] * 40, SamplingParams(n=3, max_tokens=50, ignore_eos=True))
        for _ in range(3):
            engine.step()
        engine.abort_request(["b", "several", "b", "nobody"])
        assert engine.get_num_unfinished_requests() == 2
        seen = {output.request_id for output in engine.step()}
        assert seen == {"a", "c"}
        engine.abort_request(["a", "c"])
        assert pool.num_free == pool.num_blocks
        assert engine.step() == []

    def test_abort_before_the_first_step(self, engine):
        engine.add_request("a", "ab", SamplingParams(max_tokens=5))
        engine.abort_request(["a"])
        assert not engine.has_unfinished_requests()

    def test_an_id_can_be_used_again_once_it_is_free(self, engine):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        engine.add_request("a", "ab", params)
        with pytest.raises(VLLMValidationError, match="'a' is in use"):
            engine.add_request("a", "ab", params)
        engine.abort_request(["a"])
        engine.add_request("a", "ab", params)
        assert set(run_all(engine)) == {"a"}
        engine.add_request("a", "ab", params)
        assert set(run_all(engine)) == {"a"}

    @pytest.mark.parametrize("request_id", ["", None, 3])
    def test_ids_are_strings(self, engine, request_id):
        with pytest.raises(VLLMValidationError, match="request_id must be a non-empty string"):
            engine.add_request(request_id, "ab", SamplingParams())

    def test_a_beam_search_is_no_single_request(self, engine):
        with pytest.raises(VLLMValidationError, match="use_beam_search"):
            engine.add_request("a", "ab", SamplingParams(use_beam_search=True, temperature=0, best_of=2))

    def test_broken_logits_end_their_request_alone(self, tiny, monkeypatch):
        model = tiny.llm_engine.engine_core.executor.worker.model_runner.model
        inner = model.compute_logits
        prompts = random_prompts(VOCAB_SIZE, (20, 33, 20), seed=3)
        params = [
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
            SamplingParams(seed=1, max_tokens=6, ignore_eos=True, stop=["never there"]),
            SamplingParams(seed=2, max_tokens=6, ignore_eos=True, logprob_token_ids=[4]),
        ]
        expected = generate(tiny, prompts, params)
        for broken in range(3):
            for value in (float("nan"), float("inf")):
                calls = 0

                def compute_logits(hidden, broken=broken, value=value):
                    nonlocal calls
                    calls += 1
                    logits = inner(hidden)
                    if calls == 3:
                        logits[broken, 17] = value
                    return logits

                tiny.reset_prefix_cache()
                with monkeypatch.context() as patch:
                    patch.setattr(model, "compute_logits", compute_logits)
                    outputs = generate(tiny, prompts, params)
                for index, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
                    if index != broken:
                        assert_same_readings(output, whole, 1e-5)
                        continue
                    completion = output.outputs[0]
                    assert output.finished and completion.finish_reason == "error"
                    assert completion.token_ids == texts(whole)[0][:2]
                    assert output.request_id in completion.error and "not finite" in completion.error
                assert is_empty(tiny)
                # Nothing that the broken request may have spoilt is found again.
                for output, whole in zip(generate(tiny, prompts, params), expected, strict=True):
                    assert_same_readings(output, whole, 1e-5)

    def test_a_failed_step_takes_its_requests_only(self, engine, monkeypatch):
        scheduler = engine.engine_core.scheduler
        usual, scheduler._max_running = scheduler._max_running, 1
        try:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            engine.add_request("first", "ab", params)
            engine.add_request("second", "cd", params)
            with monkeypatch.context() as patch:
                model = engine.engine_core.executor.worker.model_runner.model
                patch.setattr(model, "compute_logits", lambda hidden: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
            assert engine.get_num_unfinished_requests() == 1
            assert set(run_all(engine)) == {"second"}
        finally:
            scheduler._max_running = usual

    def test_streams_add_up(self, engine):
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
        for kind in kinds:
            params = SamplingParams(seed=4, max_tokens=40, ignore_eos=True, logprobs=1, output_kind=kind)
            engine.add_request(kind.name, "ab", params)
        outputs = run_all(engine)
        delta, cumulative, final = ([output.outputs[0] for output in outputs[kind.name]] for kind in kinds)
        assert len(delta) == len(cumulative) == 40 and len(final) == 1
        assert "".join(each.text for each in delta) == cumulative[-1].text == final[0].text
        assert [token for each in delta for token in each.token_ids] == cumulative[-1].token_ids == final[0].token_ids
        assert [entry for each in delta for entry in each.logprobs] == list(final[0].logprobs)
        assert cumulative[-1].logprobs == final[0].logprobs


PROMPTS = random_prompts(VOCAB_SIZE, (30, 45, 17, 60, 33, 5), seed=2)


class TestBlocks:
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_a_tiny_cache_gives_what_a_roomy_one_gives(self, tiny_on_device, folder, device, policy, caching):
        expected = generate(tiny_on_device, PROMPTS, MIXED)
        cramped = make_tiny_llm(
            folder,
            device=device,
            num_gpu_blocks_override=6,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            max_num_batched_tokens=40,
        )
        outputs = generate(cramped, PROMPTS, MIXED)
        assert cramped.llm_engine.engine_core.scheduler.num_preemptions > 0
        for output, whole in zip(outputs, expected, strict=True):
            assert_same_readings(output, whole, 1e-5)
        assert is_empty(cramped)

    def test_equal_requests_of_one_step_share_their_blocks(self, engine):
        engine.reset_prefix_cache()
        scheduler = engine.engine_core.scheduler
        prompt = random_prompts(VOCAB_SIZE, (40,), seed=6)[0]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=4)
        for name in "abcd":
            engine.add_request(name, prompt, params)
        first = sorted(engine.step(), key=lambda output: output.request_id)
        assert scheduler.kv.pool.num_blocks - scheduler.kv.pool.num_free == 2 + 4
        # All but the last token, which each computes: what follows the whole blocks is written four times.
        assert [output.num_cached_tokens for output in first] == [0, 39, 39, 39]
        outputs = [each[-1] for each in run_all(engine).values()]
        for output in outputs[1:]:
            assert_same_readings(output, outputs[0], 1e-5)

    def test_num_cached_tokens_and_reset(self, tiny_on_device):
        assert tiny_on_device.reset_prefix_cache()
        prompt = random_prompts(VOCAB_SIZE, (49,), seed=7)[0]
        params = SamplingParams(temperature=0, max_tokens=1)
        cached = []
        for _ in range(2):
            cached.append(generate(tiny_on_device, [prompt], params)[0].num_cached_tokens)
        for salt in ("s", "s", "t"):
            salted = {"prompt_token_ids": prompt, "cache_salt": salt}
            cached.append(generate(tiny_on_device, [salted], params)[0].num_cached_tokens)
        assert tiny_on_device.reset_prefix_cache()
        cached.append(generate(tiny_on_device, [prompt], params)[0].num_cached_tokens)
        assert cached == [0, 48, 0, 48, 0, 0]

    def test_no_reset_while_requests_run(self, engine):
        engine.add_request("a", "ab", SamplingParams(max_tokens=5, ignore_eos=True))
        engine.step()
        assert not engine.reset_prefix_cache()
        run_all(engine)
        assert engine.reset_prefix_cache()

    def test_priority_runs_first(self, folder):
        tiny = make_tiny_llm(folder, scheduling_policy="priority", max_num_seqs=1)
        order = []
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for index, priority in enumerate([3, 1, 2, 1]):
            tiny.llm_engine.add_request(str(index), "ab", params, priority=priority)
        while tiny.llm_engine.has_unfinished_requests():
            order += [output.request_id for output in tiny.llm_engine.step() if output.finished]
        assert order == ["1", "3", "2", "0"]

    @pytest.mark.parametrize("fields", [{"max_num_seqs": 1}, {"max_num_seqs": 3}, {"block_size": 4}, {"block_size": 7}])
    def test_the_shape_of_steps_changes_nothing(self, tiny_on_device, folder, device, fields):
        expected = generate(tiny_on_device, PROMPTS, MIXED)
        for output, whole in zip(
            generate(make_tiny_llm(folder, device=device, **fields), PROMPTS, MIXED), expected, strict=True
        ):
            assert_same_readings(output, whole, 1e-5)


class TestLogits:
    """The effects of processing, read back in processed modes and computed by hand from the raw ones."""

    PROMPT = (5, 9, 9, 17)

    def read(self, tiny, mode, **fields) -> tuple[np.ndarray, list[int]]:
        """Logits [P, V] by the mode, and the tokens generated."""
        fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, **fields}
        params = SamplingParams(logprobs=-1, logprobs_mode=mode, **fields)
        completion = generate(tiny, [list(self.PROMPT)], params)[0].outputs[0]
        return completion.logprobs.select(range(VOCAB_SIZE)).logits, completion.token_ids

    def both(self, tiny, **fields):
        raw, tokens = self.read(tiny, "raw_logits", **fields)
        processed, again = self.read(tiny, "processed_logits", **fields)
        assert tokens == again
        return raw, processed, tokens

    def test_penalties(self, tiny_on_device):
        fields = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.75}
        raw, processed, tokens = self.both(tiny_on_device, **fields, logit_bias={9: 6.0, 30: 5.0})
        for position, row in enumerate(raw.astype(np.float64)):
            generated = tokens[:position]
            row[9] += 6.0
            row[30] += 5.0
            for token in {*self.PROMPT, *generated}:
                row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
            for token in set(generated):
                row[token] -= 0.25 * generated.count(token) + 0.75
            np.testing.assert_allclose(processed[position], row, atol=1e-5)
            assert tokens[position] == row.argmax()

    def test_allowed_token_ids(self, tiny_on_device):
        allowed = [7, 40, 41]
        raw, processed, tokens = self.both(tiny_on_device, allowed_token_ids=allowed)
        others = np.setdiff1d(np.arange(VOCAB_SIZE), allowed)
        assert np.isneginf(processed[:, others]).all()
        np.testing.assert_array_equal(processed[:, allowed], raw[:, allowed])
        assert tokens == [allowed[i] for i in raw[:, allowed].argmax(axis=1)]

    def test_temperature_and_cuts(self, tiny_on_device):
        raw, processed, tokens = self.both(tiny_on_device, temperature=0.5, top_k=6, seed=3)
        for position, row in enumerate(raw):
            kept = np.argsort(-row, kind="stable")[:6]
            assert set(np.flatnonzero(np.isfinite(processed[position]))) == set(kept)
            np.testing.assert_allclose(processed[position, kept], row[kept] / 0.5, rtol=1e-5)
            assert tokens[position] in kept

    def test_nothing_left_to_sample_is_that_requests_error(self, tiny_on_device):
        params = SamplingParams(temperature=0, allowed_token_ids=byte_ids("a"), bad_words=["aa"], max_tokens=4)
        stuck, free = generate(
            tiny_on_device, ["a", "a"], [params, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
        )
        assert stuck.outputs[0].finish_reason == "error"
        assert "allowed_token_ids and min_tokens" in stuck.outputs[0].error
        assert len(texts(free)[0]) == 3
        assert is_empty(tiny_on_device)

    def test_draws_follow_the_models_distribution(self, tiny_on_device):
        bias = dict.fromkeys((40, 41, 42), 60.0)
        _, processed, _ = self.both(tiny_on_device, logit_bias=bias, max_tokens=1)
        weights = torch.softmax(torch.tensor(processed[0].astype(np.float64)), 0).numpy()
        params = SamplingParams(n=400, seed=0, max_tokens=1, ignore_eos=True, logit_bias=bias)
        drawn = [tokens[0] for tokens in texts(generate(tiny_on_device, [list(self.PROMPT)], params)[0])]
        assert set(drawn) <= set(bias)
        for token in bias:
            # Five standard deviations of a binomial.
            spread = 5 * np.sqrt(weights[token] * (1 - weights[token]) / 400)
            assert abs(drawn.count(token) / 400 - weights[token]) < spread


def test_the_embedded_model_goes_on_as_it_was_told(llm):
    prompts = ["The capital of France is", "1, 2, 3, 4, 5,", "Once upon a"]
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs = [output.outputs[0].text for output in generate(llm, prompts, params)]
    assert outputs[0].startswith(" Paris")
    assert outputs[1].startswith(" 6, 7")
    assert outputs[2].startswith(" time")
    stopped = SamplingParams(temperature=0, max_tokens=40, stop=[" 8", ","])
    completion = generate(llm, [prompts[1]], stopped)[0].outputs[0]
    assert (completion.text, completion.stop_reason) == (" 6", ",")


def test_emoji_stream_whole_from_the_embedded_model(llm):
    engine = llm.llm_engine
    smile = engine.tokenizer.encode("🤗")
    assert len(smile) > 1
    params = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=smile, output_kind=RequestOutputKind.DELTA)
    engine.add_request("r", "🤗🤗🤗🤗🤗🤗", params)
    pieces = [output.outputs[0].text for output in run_all(engine)["r"]]
    assert pieces.count("") and "".join(pieces).startswith("🤗🤗")
    assert all("\ufffd" not in piece for piece in pieces)


def test_byte_ids_are_the_tokenizers(tiny):
    assert tiny.llm_engine.tokenizer.decode(byte_ids("é🙂")) == "é🙂"


def test_errors_of_the_tokenizer_and_of_the_weights_are_raised(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a usable tokenizer"):
        make_tiny_llm(folder, tokenizer=str(tmp_path))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match="has neither model.safetensors"):
        make_tiny_llm(tmp_path)
    # A tokenizer that was named is read before a model is.
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a usable tokenizer"):
        make_tiny_llm(tmp_path, tokenizer=str(tmp_path / "named"))

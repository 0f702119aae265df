"""Beam searches that fail, are interrupted or are refused: nothing is left, and nobody else notices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from beam_search_reference import RecordingBar, beam_params, contents, make_llm, make_model
from models_util import make_random_model
from tiny_llm import is_empty

from vllm import LLM, BeamSearchParams, SamplingParams
from vllm.exceptions import VLLMValidationError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


class TestFailures:
    PROMPTS = ([3, 4, 5], [6, 7, 8, 9], [10, 11])

    @pytest.fixture
    def folder(self, tmp_path):
        """A model whose head is not its embedding, which `poison` is to leave alone."""
        return make_random_model("llama", "odd", tmp_path)[0]

    @pytest.fixture
    def llm(self, folder):
        return make_llm(folder)

    @staticmethod
    def poison(llm: LLM, token_id: int) -> None:
        """Whatever reads this token gives NaN."""

        def fill(worker: Any) -> None:
            worker.model_runner.model.model.embed_tokens.weight.data[token_id] = torch.nan

        llm.collective_rpc(fill)

    def test_a_prompt_with_nan_logits_ends_alone(self, llm):
        params = beam_params(3, 2, 1.0, False, 6)
        clean = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        self.poison(llm, 7)
        llm.reset_prefix_cache()
        broken = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        assert [each.finish_reason for each in broken[1].outputs] == ["error"]
        assert broken[1].request_id in broken[1].outputs[0].error and "NaN" in broken[1].outputs[0].error
        for i in (0, 2):
            assert [each.token_ids for each in broken[i].outputs] == [each.token_ids for each in clean[i].outputs]
        found = llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)
        assert found[1].sequences == [] and "NaN" in found[1].error
        assert found[0].error is None and len(found[0].sequences) == 3
        assert is_empty(llm)

    def test_nan_in_one_beam_ends_its_prompt_and_drops_the_other_beams(self, folder):
        # One request a step: the broken beam is the first of its step, the others are still waiting.
        llm = make_llm(folder, max_num_seqs=1)
        params = beam_params(3, 3, 1.0, "never", 6)
        clean = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        used = {token for output in clean[1:] for each in output.outputs for token in each.token_ids}
        first = clean[0].outputs[0].token_ids[0]
        assert first not in used.union(*self.PROMPTS)
        self.poison(llm, first)
        llm.reset_prefix_cache()
        finished: list[int] = []
        broken = llm.generate(list(self.PROMPTS), params, use_tqdm=lambda **_: RecordingBar(finished))
        assert [each.finish_reason for each in broken[0].outputs] == ["error"]
        for one, other in zip(broken[1:], clean[1:], strict=True):
            assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert finished == [1, 1, 1]
        assert is_empty(llm)

    def test_a_search_that_outgrows_the_cache_ends_alone(self, llama):
        llm = make_llm(llama[0], num_gpu_blocks_override=2)
        prompts = [list(range(100, 130)), [5, 6, 7]]
        long, short = llm.beam_search(prompts, BeamSearchParams(3, 10, ignore_eos=True), use_tqdm=False)
        assert long.sequences == [] and "KV cache" in long.error
        assert short.error is None and [len(each.tokens) for each in short.sequences] == [13] * 3
        assert is_empty(llm)

    def test_interruptions_and_faults_leave_nothing(self, llm, monkeypatch):
        before = contents(llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False))
        core = llm.llm_engine.engine_core
        places = (
            (core.scheduler, "schedule"),
            (core.executor.worker.model_runner.model, "compute_logits"),
            (llm.llm_engine.output_processor, "process_outputs"),
            (llm.llm_engine, "add_processed"),
        )
        for (owner, name), at, error in itertools.product(places, (1, 2, 5), (KeyboardInterrupt, MemoryError)):
            calls = itertools.count(1)
            inner = getattr(owner, name)

            def fail(*args, inner=inner, at=at, calls=calls, error=error, **kwargs):
                if next(calls) == at:
                    raise error
                return inner(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(error):
                    llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)
            assert is_empty(llm), (name, at)
        assert contents(llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)) == before

    def test_a_bad_request_beside_it_queues_nothing(self, llm):
        beam = beam_params(2, 2, 1.0, False, 4)
        with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
            bad = SamplingParams(logprob_token_ids=[10**6])
            llm.generate(list(self.PROMPTS), [beam, beam, bad], use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="1000000"):
            llm.generate([*self.PROMPTS[:2], [10**6]], beam, use_tqdm=False)
        assert is_empty(llm)

    @pytest.mark.parametrize(
        ("priority", "expected"),
        [
            ([1, 0, 0], ["1"] * 5 + ["2", "0", "0", "0", "0", "0"]),
            # With equal priority, a search's later readings are as old as its first.
            ([0, 0, 0], ["0"] * 5 + ["1"] * 5 + ["2"]),
        ],
    )
    def test_priority_and_arrival_hold_for_all_readings(self, llama, priority, expected):
        llm = make_llm(llama[0], scheduling_policy="priority", max_num_seqs=1)
        order: list[str] = []
        inner = llm.llm_engine.step

        def step() -> list[Any]:
            outputs = inner()
            order.extend(output.request_id.partition(".")[0] for output in outputs)
            return outputs

        llm.llm_engine.step = step
        beam, plain = beam_params(2, 2, 1.0, False, 3), SamplingParams(temperature=0, max_tokens=1)
        llm.generate([[5, 6], [7, 8], [9]], [beam, beam, plain], use_tqdm=False, priority=priority)
        assert order == expected


class TestParams:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"beam_width": 0}, "beam_width"),
            ({"beam_width": 2.5}, "beam_width"),
            ({"beam_width": True}, "beam_width"),
            ({"beam_width": 16385}, "beam_width"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"length_penalty": float("inf")}, "length_penalty"),
            ({"length_penalty": "1"}, "length_penalty"),
            ({"early_stopping": "always"}, "early_stopping"),
            ({"early_stopping": 1}, "early_stopping"),
            ({"ignore_eos": None}, "ignore_eos"),
            ({"skip_special_tokens": 1}, "skip_special_tokens"),
            ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ],
    )
    def test_bad_values_are_named(self, fields, name):
        with pytest.raises(VLLMValidationError, match=name) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
        assert caught.value.parameter == name

    def test_numpy_numbers_are_numbers(self):
        params = BeamSearchParams(np.int64(3), np.int32(4), temperature=np.float32(0.5))
        assert (type(params.beam_width), type(params.max_tokens), type(params.temperature)) == (int, int, float)

    @pytest.mark.parametrize(
        "fields",
        [{"temperature": 1.0}, {"top_p": 0.5}, {"logprobs": 1}, {"stop": "a"}, {"top_k": 2}, {"max_tokens": 0}],
    )
    def test_what_beam_search_cannot_be_combined_with(self, fields):
        (name,) = fields
        with pytest.raises(VLLMValidationError, match="use_beam_search") as caught:
            SamplingParams(**{"use_beam_search": True, "temperature": 0, **fields})
        assert caught.value.parameter == name

    def test_the_wrong_kind_of_params(self, llama):
        llm = make_llm(llama[0])
        with pytest.raises(VLLMValidationError, match="BeamSearchParams, got SamplingParams"):
            llm.beam_search([[1]], SamplingParams(), use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="SamplingParams, got BeamSearchParams"):
            llm.generate([[1]], BeamSearchParams(2, 2), use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="2 entries for 1 prompts"):
            llm.beam_search([[1]], [BeamSearchParams(2, 2)] * 2, use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="no room"):
            llm.beam_search([[1] * 64], BeamSearchParams(2, 2), use_tqdm=False)
        assert llm.beam_search([], BeamSearchParams(2, 2), use_tqdm=False) == []
        assert is_empty(llm)

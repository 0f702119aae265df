"""Recorded decode steps: the very results of steps that go through the modules."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import needs_kernels
from models_util import ARCHITECTURES, make_random_model, random_prompts

from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu import recorded_decode

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory):
    made, _ = make_random_model(request.param, "small", tmp_path_factory.mktemp(request.param))
    return made


def make_llm(folder, **fields):
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, **{"dtype": "bfloat16", **fields})


def generate(llm, num_prompts):
    """Requests that end one after another, so that every smaller batch is seen; lengths that cross blocks."""
    prompts = random_prompts(199, tuple(range(3, 3 + 5 * num_prompts, 5)))
    params = [
        SamplingParams(
            max_tokens=8 + 3 * index,
            ignore_eos=True,
            detokenize=False,
            seed=index,
            logprobs=2,
            logprob_token_ids=[3, 7],
        )
        for index in range(num_prompts)
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]


def recordings(llm):
    """Batch size -> recorded step."""
    return llm.llm_engine.engine_core.executor.worker.model_runner._recorded_decode._recorded


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for field in ("token_ids", "logprobs", "logits", "ranks"):
            np.testing.assert_array_equal(getattr(one.logprobs, field), getattr(other.logprobs, field))


@pytest.mark.parametrize("fields", [{}, {"quantization": "int8"}, {"dtype": "float32"}], ids=["bf16", "int8", "fp32"])
def test_every_bit_is_that_of_the_modules(folder, fields):
    llm = make_llm(folder, **fields)
    for num_prompts in (1, 5):
        assert_same(generate(llm, num_prompts), generate(make_llm(folder, enforce_eager=True, **fields), num_prompts))
    assert set(recordings(llm)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("layout", ["packed_f32", "packed_fp16"])
def test_every_layout_of_ours_is_recorded(folder, layout, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    llm = make_llm(folder)
    assert_same(generate(llm, 2), generate(make_llm(folder, enforce_eager=True), 2))
    assert set(recordings(llm)) == {1, 2}


def test_the_log_says_what_cannot_be_recorded(folder, monkeypatch, caplog):
    llm = make_llm(folder)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    monkeypatch.setattr(model, "forward", lambda *args, own=model.forward: own(*args) + 0)
    with caplog.at_level("INFO", logger="vllm"):
        generate(llm, 2)
    assert [each for each in caplog.messages if "Decode" in each] == [
        "Decode steps are not recorded but run by Python, because of aten.add.Tensor"
    ]
    assert not recordings(llm)


def test_larger_batches_go_through_the_modules(folder, monkeypatch):
    monkeypatch.setattr(recorded_decode, "MAX_ROWS", 2)
    llm = make_llm(folder)
    assert_same(generate(llm, 4), generate(make_llm(folder, enforce_eager=True), 4))
    assert set(recordings(llm)) <= {1, 2}


def test_the_oldest_recordings_go(folder, monkeypatch):
    monkeypatch.setattr(recorded_decode, "_MAX_RECORDINGS", 2)
    llm = make_llm(folder)
    assert_same(generate(llm, 4), generate(make_llm(folder, enforce_eager=True), 4))
    assert len(recordings(llm)) <= 2


def test_blocks_that_move(folder):
    """Too few blocks for all: requests are preempted and come back to others."""
    few = {"num_gpu_blocks_override": 9, "enable_prefix_caching": False}
    assert_same(generate(make_llm(folder, **few), 4), generate(make_llm(folder, enforce_eager=True), 4))


def test_hooks_are_called_with_enforce_eager(folder):
    llm = make_llm(folder, enforce_eager=True)
    calls = []
    llm.collective_rpc(lambda worker: worker.model_runner.model.register_forward_hook(lambda *args: calls.append(1)))
    generate(llm, 1)
    assert len(calls) == 8

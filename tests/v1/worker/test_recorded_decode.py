"""Recorded decode steps: the very results of steps that go through the modules."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from layouts import needs_kernels
from models_util import ARCHITECTURES, make_random_model, random_prompts
from torch.nn.modules.module import register_module_forward_hook

from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.replay import deferred_steps, recorded_decode

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
    steps = llm.llm_engine.engine_core.executor.worker.model_runner.replay.steps._recorded
    assert all(num_rows == num_tokens for num_rows, num_tokens, _ in steps)
    return {num_rows: step for (num_rows, _, _), step in steps.items()}


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


@pytest.mark.parametrize("fields", [{}, {"quantization": "int8"}], ids=["bf16", "int8"])
def test_every_bit_of_deferred_steps_is_that_of_the_modules(folder, monkeypatch, fields):
    """Prompts alone, in pieces beside decodes, with tokens in common, and read at all positions."""
    monkeypatch.setattr(deferred_steps, "LEAST_TOKENS", 5)
    fields = {**fields, "max_num_batched_tokens": 16}
    llm, modules = make_llm(folder, **fields), make_llm(folder, enforce_eager=True, **fields)
    assert_same(generate(llm, 5), generate(modules, 5))
    start = random_prompts(199, (37,))[0]
    prompts = [start, *([*start[:21], *range(5 + count)] for count in range(3))]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, detokenize=False)
    outputs = (each.generate(inputs, params, use_tqdm=False) for each in (llm, modules))
    for ours, theirs in zip(*outputs, strict=True):
        np.testing.assert_array_equal(ours.prompt_logprobs.logprobs, theirs.prompt_logprobs.logprobs)
    assert large_steps(llm)._defers


def large_steps(llm):
    return llm.llm_engine.engine_core.executor.worker.model_runner.replay.large_steps


@pytest.mark.parametrize("of_all", [False, True], ids=["of a module", "of all modules"])
def test_hooks_see_results_of_steps_that_would_be_deferred(folder, monkeypatch, of_all):
    monkeypatch.setattr(deferred_steps, "LEAST_TOKENS", 5)
    llm, seen = make_llm(folder), []
    generate(llm, 3)
    assert large_steps(llm)._defers
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    layer = model.model.layers[0]
    register = register_module_forward_hook if of_all else layer.register_forward_hook

    def hook(module, given, out):
        if module is layer:
            # A copy is an operation, which would wait for deferred kernels.
            seen.append(out[0].tolist() == out[0].clone().tolist())

    with register(hook):
        generate(llm, 4)
    assert seen and all(seen)


def test_a_model_of_other_operations_is_not_deferred(folder, monkeypatch):
    monkeypatch.setattr(deferred_steps, "LEAST_TOKENS", 5)
    llm = make_llm(folder)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    monkeypatch.setattr(model, "forward", lambda *args, own=model.forward: own(*args) + 0)
    assert_same(generate(llm, 2), generate(make_llm(folder, enforce_eager=True), 2))
    assert large_steps(llm)._defers is False


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


def greedy(llm, wanted):
    """Greedy requests that end one after another, each with the fields of `wanted`."""
    prompts = random_prompts(199, tuple(range(3, 3 + 5 * len(wanted), 5)))
    params = [
        SamplingParams(temperature=0.0, max_tokens=8 + 3 * index, ignore_eos=True, detokenize=False, **fields)
        for index, fields in enumerate(wanted)
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("wanted", "replayed"),
    [
        ([{}] * 3, True),
        ([{"logprob_token_ids": [5, 3]}, {"logprob_token_ids": [7]}, {"logprob_token_ids": []}], True),
        ([{"logprob_token_ids": [9]}] * 3, True),
        ([{"logprobs": 2}] * 2, False),
        ([{"logprob_token_ids": [9], "logprob_entropy": True}] * 2, False),
        ([{"repetition_penalty": 1.5}] * 2, False),
        ([{"min_tokens": 5, "stop_token_ids": [2]}] * 2, True),
    ],
)
def test_greedy_rows_are_sampled_by_a_replay(folder, monkeypatch, wanted, replayed):
    calls = []
    own = recorded_decode.RecordedGreedy.__call__
    monkeypatch.setattr(
        recorded_decode.RecordedGreedy,
        "__call__",
        lambda self, step, slots: calls.append(own(self, step, slots)) or calls[-1],
    )
    llm = make_llm(folder)
    found = greedy(llm, wanted)
    assert any(call is not None for call in calls) is replayed
    for ours, theirs in zip(found, greedy(make_llm(folder, enforce_eager=True), wanted), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.logprobs is None) is (theirs.logprobs is None)
        if ours.logprobs is not None:
            assert_same([ours], [theirs])
    # Lists of the same width, one after another, by the same recording.
    others = [{"logprob_token_ids": [11, 12]}]
    assert_same(greedy(llm, others), greedy(make_llm(folder, enforce_eager=True), others))


def test_large_logits_are_left_to_the_sampler(folder, monkeypatch):
    monkeypatch.setattr(recorded_decode, "_MOST_LOGITS_BYTES", 4 * 199)
    llm = make_llm(folder)
    found = greedy(llm, [{}, {}])
    assert [each.token_ids for each in found] == [
        each.token_ids for each in greedy(make_llm(folder, enforce_eager=True), [{}, {}])
    ]
    assert set(recordings(llm)) == {1, 2}
    assert recordings(llm)[1].sampling
    assert not recordings(llm)[2].sampling


def test_a_head_that_cannot_be_recorded_is_left_to_the_sampler(folder, monkeypatch):
    llm = make_llm(folder)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    own = type(model).compute_logits
    monkeypatch.setattr(type(model), "compute_logits", lambda self, hidden: own(self, hidden) + 0)
    found = greedy(llm, [{}])
    assert found[0].token_ids == greedy(make_llm(folder, enforce_eager=True), [{}])[0].token_ids
    assert recordings(llm)[1].sampling == {None: None}


def test_another_head_is_called_in_every_step(folder, monkeypatch):
    llm = make_llm(folder)
    greedy(llm, [{}])
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    calls = []
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden, own=model.compute_logits: calls.append(1) or own(hidden)
    )
    greedy(llm, [{}])
    assert len(calls) == 8


def test_a_step_of_single_tokens_is_built_as_any_other(folder, monkeypatch):
    own, built = model_runner.build_input_batch, []

    def build(step, *args):
        batch = own(step, *args)
        if step.total_num_scheduled_tokens == len(step.num_scheduled_tokens):
            # The sum only tells such steps apart.
            step.total_num_scheduled_tokens += 1
            built.append((batch, own(step, *args)))
            step.total_num_scheduled_tokens -= 1
        return batch

    monkeypatch.setattr(model_runner, "build_input_batch", build)
    greedy(make_llm(folder), [{}] * 3)
    assert built
    for batch, other in built:
        for name, value in vars(batch).items():
            assert_same_field(value, getattr(other, name), name)


def assert_same_field(value, theirs, name):
    if isinstance(value, (list, tuple)):
        for one, other in zip(value, theirs, strict=True):
            assert_same_field(one, other, name)
    elif is_dataclass(value):
        for field in fields(value):
            assert_same_field(getattr(value, field.name), getattr(theirs, field.name), f"{name}.{field.name}")
    elif isinstance(value, np.ndarray):
        assert value.dtype == theirs.dtype, name
        np.testing.assert_array_equal(value, theirs, err_msg=name)
    else:
        assert value == theirs, name

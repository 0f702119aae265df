"""LogitsCapturingSampler: the model's own logits, whatever the sampler makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.distributed.communicator import ALONE
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler

INDICES = [2, 0, VOCAB_SIZE - 1, 65, 2]
PROMPTS = [byte_ids(text) for text in ("one", "a second, longer prompt", "3")]


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_tiny_llm(folder)


def sampler_of(llm: LLM):
    return llm.collective_rpc(lambda worker: worker.model_runner.sampler)[0]


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields})


def test_equals_the_engines_own_readings(llm):
    own = params(logprob_token_ids=INDICES, max_tokens=7)
    with LogitsCapturingSampler(INDICES).install(llm) as capture:
        outputs = llm.generate(PROMPTS, own, use_tqdm=False)
    rows = capture.get_captured_logits()
    assert rows.shape == (3 * 7, 5) and rows.dtype == torch.float32 and rows.device.type == "cpu"
    for number, output in enumerate(outputs):
        captured = capture.get_captured_logits(output.request_id)
        want = output.outputs[0].logprobs.select(INDICES[:4]).logits
        assert np.array_equal(captured[:, :4].numpy(), want)
        assert torch.equal(captured[:, 4], captured[:, 0])
        # All three prompts fit in the first step, and go on together: rows stand step by step. The last prompt, of one
        # token, comes first in its step.
        assert torch.equal(rows[(number + 1) % 3], captured[0])
        assert torch.equal(rows[3 + number :: 3], captured[1:])


def test_full_rows(llm):
    capture = LogitsCapturingSampler().install(llm)
    assert capture.get_captured_logits().shape == (0, VOCAB_SIZE)
    (output,) = llm.generate([PROMPTS[0]], params(), use_tqdm=False)
    capture.uninstall()
    rows = capture.get_captured_logits(output.request_id)
    assert rows.shape == (5, VOCAB_SIZE)
    assert rows.argmax(dim=1).tolist() == output.outputs[0].token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3.0, "seed": 1},
        {"logit_bias": {65: 50.0, 70: -100.0}},
        {"allowed_token_ids": [65, 66], "repetition_penalty": 1.5},
        {"temperature": 0.7, "seed": 5, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
        {"temperature": 1.0, "seed": 2, "logprobs_mode": "processed_logits", "logprobs": 3},
    ],
    ids=str,
)
def test_raw_logits_whatever_the_sampler_makes_of_them(llm, fields):
    capture = LogitsCapturingSampler().install(llm)
    (processed,) = llm.generate([PROMPTS[1]], params(**fields, max_tokens=4), use_tqdm=False)
    capture.uninstall()
    # The same tokens, teacher-forced: the logits before any processing are a function of them alone.
    rows = capture.get_captured_logits(processed.request_id)
    with LogitsCapturingSampler().install(llm) as again:
        for step in range(4):
            tokens = PROMPTS[1] + processed.outputs[0].token_ids[:step]
            llm.generate([tokens], params(max_tokens=1), use_tqdm=False)
    assert torch.allclose(rows, again.get_captured_logits(), atol=1e-4)


def test_installing_changes_no_result(llm):
    own = [params(temperature=1.0, seed=3, logprobs=4), params(), params(logprob_token_ids=[1, 2])]
    before = llm.generate(PROMPTS, own, use_tqdm=False)
    with LogitsCapturingSampler([1]).install(llm):
        during = llm.generate(PROMPTS, own, use_tqdm=False)
    for one, other in zip(before, during, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert is_empty(llm)


def test_samples_of_one_request_have_names_of_their_own(llm):
    with LogitsCapturingSampler([7]).install(llm) as capture:
        (output,) = llm.generate(["ab"], params(n=3, temperature=1.0, seed=0, logprob_token_ids=[7]), use_tqdm=False)
    assert len(capture.get_captured_logits()) == 15
    for sample in output.outputs:
        captured = capture.get_captured_logits(f"{sample.index}_{output.request_id}")
        assert np.array_equal(captured.numpy(), sample.logprobs.select([7]).logits)


def test_a_preempted_request_has_one_row_a_token(folder):
    # Six blocks hold neither all three requests nor the longest of each pair to its end.
    tight = make_tiny_llm(folder, max_model_len=64, num_gpu_blocks_override=6, max_num_batched_tokens=24)
    preempted = []
    core = tight.llm_engine.engine_core
    schedule = core.scheduler.schedule

    def watched():
        step = schedule()
        preempted.extend(step.preempted_req_ids)
        return step

    core.scheduler.schedule = watched
    own = params(max_tokens=30, logprob_token_ids=[9, 200])
    with LogitsCapturingSampler([9, 200]).install(tight) as capture:
        outputs = tight.generate(PROMPTS, own, use_tqdm=False)
    assert preempted
    for output in outputs:
        captured = capture.get_captured_logits(output.request_id)
        assert np.array_equal(captured.numpy(), output.outputs[0].logprobs.select([9, 200]).logits)


def test_what_was_captured_stays_until_reset(llm):
    capture = LogitsCapturingSampler([3])
    assert capture.get_captured_logits().shape == (0, 1)
    for expected in (5, 10):
        with capture.install(llm):
            llm.generate([PROMPTS[0]], params(), use_tqdm=False)
        llm.generate([PROMPTS[0]], params(), use_tqdm=False)
        assert capture.get_captured_logits().shape == (expected, 1)
    kept = capture.get_captured_logits()
    capture.reset()
    assert capture.get_captured_logits().shape == (0, 1) and kept.shape == (10, 1)
    assert capture.get_captured_logits("no such request").shape == (0, 1)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_at_a_time_leave_in_any_order(llm, first_out):
    plain = sampler_of(llm)
    captures = [LogitsCapturingSampler([1]).install(llm), LogitsCapturingSampler([1, 2]).install(llm)]
    llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
    captures[first_out].uninstall()
    llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
    captures[1 - first_out].uninstall()
    llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
    assert len(captures[first_out].get_captured_logits()) == 1
    assert len(captures[1 - first_out].get_captured_logits()) == 2
    assert sampler_of(llm) is plain


def test_an_exception_uninstalls(llm):
    plain = sampler_of(llm)
    capture = LogitsCapturingSampler([1])
    with pytest.raises(ZeroDivisionError), capture.install(llm):
        raise ZeroDivisionError
    capture.uninstall()
    assert sampler_of(llm) is plain


def test_installed_twice_is_an_error(llm):
    with LogitsCapturingSampler([1]).install(llm) as capture, pytest.raises(RuntimeError, match="installed already"):
        capture.install(llm)


def test_bad_indices(llm):
    plain = sampler_of(llm)
    for indices, message in (([-1], "indices must be at least 0; got -1"), (["a"], "indices must hold integers")):
        with pytest.raises(VLLMValidationError, match=message):
            LogitsCapturingSampler(indices)
    capture = LogitsCapturingSampler([VOCAB_SIZE])
    with pytest.raises(VLLMValidationError, match=rf"indices must be in \[0, {VOCAB_SIZE}\).*; got {VOCAB_SIZE}"):
        capture.install(llm)
    capture.uninstall()
    assert sampler_of(llm) is plain


@pytest.mark.parametrize("indices", [None, [1]])
def test_rows_are_copies_and_the_rest_is_the_samplers(indices):
    """A sampler that overwrites its logits changes nothing that was captured."""
    logits = torch.arange(6.0).view(2, 3)

    class Inner:
        states = "its states"

        def __call__(self, logits, slots, states, flag=False):
            logits.zero_()
            return flag

    runner = SimpleNamespace(sampler=Inner(), model_config=SimpleNamespace(vocab_size=3), group=ALONE)
    llm = SimpleNamespace(collective_rpc=lambda call, args=(): [call(SimpleNamespace(model_runner=runner), *args)])
    with LogitsCapturingSampler(indices).install(llm) as capture:
        assert runner.sampler.states == "its states"
        states = SimpleNamespace(req_id_to_slot={"a": 4, "b": 0, "c": 1})
        assert runner.sampler(logits, np.array([0, 4]), states, flag=True) is True
    want = torch.arange(6.0).view(2, 3)
    assert torch.equal(capture.get_captured_logits(), want if indices is None else want[:, indices])
    assert capture.get_captured_logits("b")[0, -1] == (2.0 if indices is None else 1.0)
    assert isinstance(runner.sampler, Inner)


def test_its_other_names_import() -> None:
    from vllm.entrypoints.openai import protocol_ext
    from vllm.model_executor.layers import logits_processor_ext, sampler

    assert sampler.LogitsCapturingSampler is LogitsCapturingSampler
    assert logits_processor_ext.LogitsProcessorWithIndexedOutput.__init__
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert "logits_indices" in getattr(protocol_ext, name).model_fields
    for name in ("CompletionResponseChoice", "ChatCompletionResponseChoice"):
        assert {"logits_values", "logits_values_per_token"} <= set(getattr(protocol_ext, name).model_fields)
    request = protocol_ext.CompletionRequest(prompt="The sky is", logits_indices=[1, 2])
    assert request.logits_indices == [1, 2]

"""trace_decode_token_ids: given tokens come out with the model's readings of them, for every kind of neighbour."""

from __future__ import annotations

import numpy as np
import pytest
from byte_tokenizer import VOCAB_SIZE, byte_ids
from models_util import hf_logits, make_random_model, random_prompts
from readings_reference import LOGPROB_TOLERANCE
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.messages import EngineCoreRequest


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_equal_to_transformers_among_others(async_scheduling, tmp_path, device):
    folder, model = make_random_model("llama", "odd", tmp_path)
    prompts = random_prompts(model.config.vocab_size, (20, 9, 33, 5))
    traces = random_prompts(model.config.vocab_size, (12, 7, 1), seed=1)
    params = [
        SamplingParams(temperature=0, trace_decode_token_ids=traces[0], logprobs=2, max_tokens=3),
        SamplingParams(temperature=0.7, seed=1, top_k=3, trace_decode_token_ids=traces[1], logprob_token_ids=[4, 5]),
        SamplingParams(trace_decode_token_ids=np.array(traces[2]), logprobs=0, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0),
    ]
    llm = LLM(
        str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        async_scheduling=async_scheduling,
    )
    outputs = generate(llm, prompts, params)
    (alone,) = generate(llm, prompts[-1:], params[-1:])
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    for output, prompt, trace in zip(outputs, prompts, traces, strict=False):
        (completion,) = output.outputs
        assert (completion.token_ids, completion.finish_reason) == (trace, "length")
        rows = hf_logits(model, [prompt + trace])[0].double().log_softmax(-1).numpy()[len(prompt) - 1 : -1]
        for row, token, entries in zip(rows, trace, completion.logprobs, strict=True):
            assert next(iter(entries)) == token
            assert entries[token].rank == 1 + (row > row[token]).sum()
            for token_id, entry in entries.items():
                assert abs(entry.logprob - row[token_id]) < LOGPROB_TOLERANCE
        expected = sum(row[token] for row, token in zip(rows, trace, strict=True))
        assert completion.cumulative_logprob == pytest.approx(expected, abs=1e-3)


def test_preempted(folder, tiny):
    prompts = random_prompts(VOCAB_SIZE, (60, 40, 50, 33), seed=3)
    traces = random_prompts(VOCAB_SIZE, (30,) * 4, seed=4)
    params = [SamplingParams(trace_decode_token_ids=trace, logprobs=1) for trace in traces]
    tight = make_tiny_llm(folder, device="cpu", num_gpu_blocks_override=9)
    outputs = generate(tight, prompts, params)
    assert tight.llm_engine.engine_core.scheduler.num_preemptions and is_empty(tight)
    for output, other, trace in zip(outputs, generate(tiny, prompts, params), traces, strict=True):
        assert output.outputs[0].token_ids == trace
        assert output.outputs[0].logprobs == other.outputs[0].logprobs


def test_nothing_ends_a_trace(tiny):
    trace = [2, 2, *byte_ids("stop it"), 7]
    params = SamplingParams(trace_decode_token_ids=trace, stop=["op"], stop_token_ids=[7], min_tokens=3)
    (output,) = generate(tiny, [byte_ids("ab")], params)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (trace, "length", None)
    assert "stop it" in completion.text


def test_a_trace_ends_with_the_context(tiny):
    (prompt,) = random_prompts(VOCAB_SIZE, (125,))
    (output,) = generate(tiny, [prompt], SamplingParams(trace_decode_token_ids=[5, 6, 7, 8]))
    assert output.outputs[0].token_ids == [5, 6, 7]


def test_sent_to_another_process():
    params = SamplingParams(trace_decode_token_ids=[5, 5], repetition_detection=None)
    # Its package may be missing where the tests for a device run.
    from vllm.v1.engine.core_process.serial import decode_request, encode_request

    again = decode_request(encode_request(EngineCoreRequest("r", [1], params, frozenset(), 0.0)))
    assert again.sampling_params.trace_decode_token_ids == [5, 5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "needs n=1, got 2"),
        ({"best_of": 2}, "needs best_of=None, got 2"),
        ({"bad_words": ["a"]}, "needs bad_words="),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, "needs repetition_detection=None"),
        ({"max_tokens": 0}, "needs max_tokens of at least 1"),
        ({"trace_decode_token_ids": [-1]}, "must not be negative"),
        ({"trace_decode_token_ids": ["1"]}, "must hold integers"),
        ({"trace_decode_token_ids": 3}, "must be a list of integers"),
    ],
)
def test_what_cannot_be_combined(fields, message):
    with pytest.raises(VLLMValidationError, match=f"trace_decode_token_ids {message}"):
        SamplingParams(**{"trace_decode_token_ids": [1], **fields})


def test_ids_beyond_the_vocabulary(tiny):
    assert SamplingParams(trace_decode_token_ids=[]).trace_decode_token_ids is None
    with pytest.raises(VLLMValidationError, match=rf"trace_decode_token_ids must be in \[0, {VOCAB_SIZE}\)"):
        generate(tiny, [[5]], SamplingParams(trace_decode_token_ids=[VOCAB_SIZE]))

"""`RequestOutput.prompt_token_id_logprobs`: a matrix of chosen ids at prompt positions, for every way to ask for it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE
from models_util import hf_logits, make_random_model, random_prompts
from readings_reference import LOGPROB_TOLERANCE
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs.id_rows import padded, readable
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.messages import EngineCoreRequest

START = 3


def table_for(prompt: list[int], vocab_size: int, start: int = 0) -> np.ndarray:
    """int32 [rows, 5]: the prompt's own token, an id that stands twice, padding in any column."""
    rng = np.random.default_rng(len(prompt))
    table = rng.integers(0, vocab_size, (len(prompt) - 1 - start, 5)).astype(np.int32)
    table[:, 1] = prompt[start + 1 :]
    table[::2, 3] = table[::2, 0]
    table[1::3, 2] = -1
    table[::4, 4] = -1
    return table


def expected_of(logits: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`logits` float64 [P, V]."""
    logprobs = torch.from_numpy(logits).log_softmax(-1).numpy()[: len(table)]
    return np.where(table < 0, -np.inf, np.take_along_axis(logprobs, np.maximum(table, 0), axis=1))


@pytest.mark.parametrize("chunk", [7, None])
def test_equal_to_transformers_cold_and_cached(chunk, tmp_path, device):
    folder, model = make_random_model("qwen3", "odd", tmp_path)
    vocab_size = model.config.vocab_size
    prompts = random_prompts(vocab_size, (50, 5, 33))
    tables = [table_for(prompt, vocab_size) for prompt in prompts]
    params = [SamplingParams(max_tokens=1, prompt_logprob_token_ids=table) for table in tables]
    llm = LLM(
        str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        max_num_batched_tokens=chunk,
    )
    expected = [
        expected_of(logits.double().numpy(), table)
        for logits, table in zip(hf_logits(model, prompts), tables, strict=True)
    ]
    for cache in ("cold", "cached"):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, matrix in zip(outputs, expected, strict=True):
            assert output.prompt_token_id_logprobs.dtype == np.float32
            np.testing.assert_allclose(output.prompt_token_id_logprobs, matrix, rtol=0, atol=LOGPROB_TOLERANCE)
        if cache == "cached":
            assert outputs[0].num_cached_tokens == 48


def test_preempted(folder, tiny):
    prompts = random_prompts(VOCAB_SIZE, (60, 40, 50, 33, 20), seed=3)
    params = [
        SamplingParams(
            seed=i,
            max_tokens=30,
            ignore_eos=True,
            prompt_logprob_token_ids=table_for(prompt, VOCAB_SIZE, START),
            prompt_logprob_start=START,
        )
        for i, prompt in enumerate(prompts)
    ]
    tight = make_tiny_llm(folder, device="cpu", num_gpu_blocks_override=9, max_num_batched_tokens=16)
    outputs = tight.generate(prompts, params, use_tqdm=False)
    assert tight.llm_engine.engine_core.scheduler.num_preemptions
    for output, alone in zip(outputs, tiny.generate(prompts, params, use_tqdm=False), strict=True):
        np.testing.assert_array_equal(output.prompt_token_id_logprobs, alone.prompt_token_id_logprobs)


class TestForms:
    def test_lists_and_arrays_of_any_layout_are_the_same(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (8,))
        rows = [[5, 5], [6, 7, 8], [], [9]]
        filled = padded(rows)
        forms = [
            rows,
            filled,
            np.asfortranarray(filled.astype(">i8")),
            torch.from_numpy(filled),
            [[*row, -1] for row in rows[:1]] + rows[1:],
        ]
        params = [
            SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids, prompt_logprob_start=START) for ids in forms
        ]
        first, *others = tiny.generate([prompt] * len(forms), params, use_tqdm=False)
        matrix = first.prompt_token_id_logprobs
        assert matrix.shape == (4, 3)
        assert (np.isneginf(matrix) == [[0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 1]]).all()
        assert matrix[0, 0] == matrix[0, 1] == first.prompt_logprobs[START + 1][5].logprob
        for other in others:
            np.testing.assert_array_equal(other.prompt_token_id_logprobs, matrix)
            assert other.prompt_logprobs == first.prompt_logprobs

    def test_one_list_for_all_positions_and_logits(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (8,))
        ids = [7, prompt[3], 9]
        modes = ("raw_logprobs", "raw_logits")
        params = [SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids, logprobs_mode=mode) for mode in modes]
        logprobs, logits = tiny.generate([prompt] * 2, params, use_tqdm=False)
        readings = logprobs.prompt_logprobs.select(ids)
        np.testing.assert_array_equal(logprobs.prompt_token_id_logprobs, readings.logprobs)
        np.testing.assert_array_equal(logits.prompt_token_id_logprobs, readings.logits)

    def test_where_none_were_asked_for(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (8,))
        (output,) = tiny.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
        assert output.prompt_token_id_logprobs is None
        given = np.zeros((2, 2), np.float32)
        assert RequestOutput("r", None, prompt, prompt_token_id_logprobs=given).prompt_token_id_logprobs is given
        assert RequestOutput("r", None, prompt, [None, {}]).prompt_token_id_logprobs is None

    def test_a_prompt_of_one_token_has_no_rows(self, tiny):
        params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=[4, 5])
        (output,) = tiny.generate([[7]], params, use_tqdm=False)
        assert output.prompt_token_id_logprobs.shape == (0, 2)

    def test_streams_copies_and_pickles(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (8,))
        table = np.tile(np.array([[7, -1, 8]], np.int64), (7, 1))
        params = SamplingParams(
            max_tokens=3, ignore_eos=True, prompt_logprob_token_ids=table, output_kind=RequestOutputKind.DELTA
        )
        engine = tiny.llm_engine
        engine.add_request("r", prompt, params.clone())
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        first, *later = [output.prompt_token_id_logprobs for output in outputs]
        assert first.shape == (7, 3) and later == [None, None]
        again = pickle.loads(pickle.dumps(outputs[0]))
        np.testing.assert_array_equal(again.prompt_token_id_logprobs, first)
        table[:] = 0  # the parameters hold their own copy
        assert params.prompt_logprob_token_ids[0].tolist() == [7, -1, 8]

    def test_sent_to_another_process(self):
        table = np.arange(6).reshape(3, 2)
        params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=table, prompt_logprob_start=1)
        request = EngineCoreRequest("r", [1, 2, 3, 4, 5], params, frozenset(), 0.0)
        # Its package may be missing where the tests for a device run.
        from vllm.v1.engine.core_process.serial import decode_request, encode_request

        again = decode_request(encode_request(request)).sampling_params
        assert again.prompt_logprob_token_ids.dtype == np.int32
        assert again.prompt_logprob_token_ids.tolist() == table.tolist()
        assert (again.max_tokens, again.prompt_logprob_start) == (0, 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[1.5]]), "must hold integers, got an array of float64"),
        (np.array([[True]]), "must hold integers"),
        (np.array([[None, 1]]), "must hold integers"),
        (np.array([[-2]]), "must be token ids or -1"),
        (np.array([[2**31]]), "must be token ids or -1"),
        ([[1], [-2]], r"prompt_logprob_token_ids\[1\] must be token ids or -1"),
        ([[[1]]], "must hold integers"),
        ([[1], [None]], "must hold integers"),
        ([[0] * 2**10] + [[]] * 2**19, "must have at most 268435456 cells"),
    ],
)
def test_what_is_no_table_of_ids(ids, message):
    with pytest.raises(VLLMValidationError, match=message):
        SamplingParams(prompt_logprob_token_ids=ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((3, 2), int), "has 3 lists, but 7 positions are read .scored rows"),
        (np.full((7, 2), VOCAB_SIZE), rf"must be in \[0, {VOCAB_SIZE}\)"),
        (np.zeros((7, 129), int), "prompt_logprob_token_ids of length 129"),
    ],
)
def test_what_does_not_fit(tiny, ids, message):
    with pytest.raises(VLLMValidationError, match=message):
        tiny.generate([[5] * 8], SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids), use_tqdm=False)


def test_readable_rows():
    ids = np.array([[3, -1, 3, -1], [-1, -1, -1, -1], [2, 1, 0, -1]], np.int32)
    rows = readable(ids)
    assert rows.counts.tolist() == [3, 0, 3]
    assert rows.ids.tolist() == [[3, 0, 3], [0, 0, 0], [2, 1, 0]]
    assert readable(padded([[], []])).ids.shape == (2, 0)

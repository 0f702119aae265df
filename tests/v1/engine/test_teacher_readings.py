"""Many ids at every position of a prompt, as a teacher is asked for them: right in every batch, cache and chunk, and in
little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from byte_tokenizer import VOCAB_SIZE
from models_util import hf_logits, make_random_model, random_prompts
from readings_reference import LOGPROB_TOLERANCE, TIE_DISTANCE
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams

LENGTHS = (1, 2, 17, 40, 33, 50)


def lists_for(prompt: list[int], vocab_size: int) -> list[list[int]]:
    """A row a position: none, few, many and all ids, with -1 and repeated ids anywhere."""
    rng = np.random.default_rng(len(prompt))
    lengths = rng.choice([0, 1, 3, 40, 130, 200, 257, vocab_size], len(prompt) - 1)
    rows = [rng.integers(-1, vocab_size, length).tolist() for length in lengths]
    if rows:
        rows[-1] = rng.permutation(vocab_size).tolist()
    return rows


def assert_right(output, rows: list[list[int]], logits: np.ndarray, start: int = 0) -> None:
    """Tables and entries; `logits` float64 [P, V]."""
    width = max(map(len, rows), default=0)
    tables, readings = output.prompt_tables, output.prompt_logprobs
    assert tables.logprobs.shape == (len(rows), max(1, width))
    np.testing.assert_array_equal(tables.logprobs, output.prompt_token_id_logprobs)
    for index, asked in enumerate(rows):
        row = logits[start + index]
        ids, own = np.array(asked, int), row - (row.max() + np.log(np.exp(row - row.max()).sum()))
        is_id = np.zeros(tables.logprobs.shape[1], bool)
        is_id[: len(ids)] = ids >= 0
        wanted = ids[ids >= 0]
        np.testing.assert_allclose(tables.logprobs[index][is_id], own[wanted], rtol=0, atol=LOGPROB_TOLERANCE)
        assert (tables.logprobs[index][~is_id] == -np.inf).all() and (tables.token_ids[index][~is_id] == -1).all()
        np.testing.assert_array_equal(tables.token_ids[index][is_id], wanted)
        above = [1 + (row > row[wanted, None] + sign * TIE_DISTANCE).sum(axis=1) for sign in (1, -1)]
        ranks = tables.ranks[index]
        assert (above[0] <= ranks[is_id]).all() and (ranks[is_id] <= above[1]).all() and not ranks[~is_id].any()
        token = output.prompt_token_ids[start + index + 1]
        assert list(readings[start + index + 1]) == list(dict.fromkeys([token, *wanted.tolist()]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_random_model("qwen3", "odd", tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("chunk", [7, None])
def test_equal_to_transformers_beside_requests_that_decode(chunk, model):
    folder, reference = model
    vocab_size = reference.config.vocab_size
    prompts = random_prompts(vocab_size, LENGTHS, seed=4)
    logits = [each.double().numpy() for each in hf_logits(reference, prompts)]
    rows = [lists_for(prompt, vocab_size) for prompt in prompts]
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        max_num_batched_tokens=chunk,
        max_logprob_token_ids=-1,
    )
    decoding = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, logprob_token_ids=[1, 2])
    (alone,) = llm.generate([prompts[2]], decoding, use_tqdm=False)
    llm.reset_prefix_cache()
    for _ in ("cold", "cached"):
        params = [SamplingParams(max_tokens=1, prompt_logprob_token_ids=each or None) for each in rows]
        *outputs, neighbour = llm.generate([*prompts, prompts[2]], [*params, decoding], use_tqdm=False)
        for output, own, expected in zip(outputs[1:], rows[1:], logits[1:], strict=True):
            assert_right(output, own, expected)
        assert neighbour.outputs[0].token_ids == alone.outputs[0].token_ids
        np.testing.assert_array_equal(neighbour.outputs[0].logprobs.logprobs, alone.outputs[0].logprobs.logprobs)
    # From inside a block that is cached, of the longest prompt.
    start = 21
    params = SamplingParams(max_tokens=0, prompt_logprob_start=start, prompt_logprob_token_ids=rows[-1][start:])
    (output,) = llm.generate([prompts[-1]], params, use_tqdm=False)
    assert output.num_cached_tokens
    assert_right(output, rows[-1][start:], logits[-1], start)


def test_a_prompt_of_one_token_has_no_rows(folder):
    llm = make_tiny_llm(folder, device="cpu")
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprob_token_ids=[3, 4]), use_tqdm=False)
    assert output.prompt_token_id_logprobs.shape == (0, 2) == output.prompt_tables.ranks.shape


@pytest.mark.parametrize("ranks", [True, False])
def test_over_two_ranks(folder, ranks):
    prompts = random_prompts(VOCAB_SIZE, (20, 33), seed=5)
    params = [
        SamplingParams(
            max_tokens=1,
            temperature=0,
            prompt_logprobs=3,
            prompt_logprob_token_ids=[row[:60] for row in lists_for(prompt, VOCAB_SIZE)],
            logprob_ranks=ranks,
        )
        for prompt in prompts
    ]
    together = make_thread_llm(folder, 2, max_num_batched_tokens=24)
    try:
        outputs = together.generate(prompts, params, use_tqdm=False)
    finally:
        together.llm_engine.engine_core.shutdown()
    for output, alone in zip(outputs, make_tiny_llm(folder).generate(prompts, params, use_tqdm=False), strict=True):
        one, other = output.prompt_tables, alone.prompt_tables
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert (one.ranks is None) == (other.ranks is None) == (not ranks)
        if ranks:
            np.testing.assert_array_equal(one.ranks, other.ranks)


def test_readings_take_bytes_a_cell(folder):
    """Not an object a cell or position, nor sorts of all cells: 16 bytes a cell are kept, the ids and the matrix are
    further copies."""
    llm = make_tiny_llm(folder, device="cpu", max_logprob_token_ids=-1)
    prompts = random_prompts(VOCAB_SIZE, [120] * 20, seed=6)
    tables = [np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), (119, 1)) for _ in prompts]
    params = [SamplingParams(max_tokens=1, prompt_logprob_token_ids=table, logprob_ranks=False) for table in tables]
    llm.generate(prompts[:1], params[:1], use_tqdm=False)
    cells = sum(table.size for table in tables)
    tracemalloc.start()
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.prompt_token_id_logprobs.shape == (119, VOCAB_SIZE) for output in outputs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * cells + 4 * 2**20

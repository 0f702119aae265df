"""Prefixes that end inside a block: what is computed after a copied part is what is computed without it."""

from __future__ import annotations

import numpy as np
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.v1.core.block_pool import hash_full_blocks

COMMON = list(range(5, 5 + 37))
"""Two blocks of 16, and five tokens of the third."""


def readings(outputs) -> list[list[np.ndarray]]:
    every = [output.outputs[0].logprobs for output in outputs]
    return [[each.token_ids, each.logits, each.ranks] for each in every]


def test_readings_after_a_copied_part(folder):
    llm = make_tiny_llm(folder, device="cpu")
    # Each differs from all others in the token after the common ones, and all fill their third block.
    prompts = [{"prompt_token_ids": [*COMMON, 60 + number, *range(70, 70 + number % 4 + 12)]} for number in range(9)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprob_token_ids=[3, 1, 2], logprobs=2)
    cold = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        cold += llm.generate([prompt], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in cold] == [0] * 9
    assert llm.reset_prefix_cache()
    first = llm.generate(prompts[:1], params, use_tqdm=False)
    others = llm.generate(prompts[1:], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in others] == [len(COMMON)] * 8
    for one, other in zip(readings(cold), readings(first + others), strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[2], other[2])
        np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-5)
    assert is_empty(llm)


def test_a_conversation_goes_on_where_it_was(folder):
    llm = make_tiny_llm(folder, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    (first,) = llm.generate([{"prompt_token_ids": COMMON}], params, use_tqdm=False)
    so_far = [*COMMON, *first.outputs[0].token_ids]  # 52: the last is not in the cache, and its block not full
    (second,) = llm.generate([{"prompt_token_ids": [*so_far[:47], 9, 9]}], params, use_tqdm=False)
    assert second.num_cached_tokens == 47


def test_one_of_many_layers_and_heads_is_not_left_out(folder):
    """The cache itself: every layer's keys and values of a copied part are those of a computed one."""
    llm = make_tiny_llm(folder, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=1)
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    caches = []
    for warm in (False, True):
        assert llm.reset_prefix_cache()
        if warm:
            llm.generate([{"prompt_token_ids": [*COMMON, *range(80, 91)]}], params, use_tqdm=False)
        (output,) = llm.generate([{"prompt_token_ids": [*COMMON, *range(100, 111)]}], params, use_tqdm=False)
        assert output.num_cached_tokens == (len(COMMON) if warm else 0)
        pool = llm.llm_engine.engine_core.scheduler.kv.pool
        hashes = hash_full_blocks([*COMMON, *range(100, 111)], 16, None, [])
        blocks = [pool.find(each) for each in hashes]
        assert len(blocks) == 3 and None not in blocks
        caches.append([cache[blocks].clone() for pair in runner.kv_caches for cache in pair])
    for cold, copied in zip(*caches, strict=True):
        np.testing.assert_allclose(cold.float(), copied.float(), rtol=0, atol=1e-5)

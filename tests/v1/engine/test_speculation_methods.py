"""300 greedy prompts with every method: each token and each reading is that of an engine that does not speculate."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE
from test_speculation import READS, assert_same, drawing, run
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft model": {"num_speculative_tokens": 3},
    "few at once": {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 8},
}


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return make_tiny_llm(folder)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, some with the same beginning, and what is read of them."""
    rng = random.Random(5)
    prompts, params = [], []
    for index in range(300):
        pattern = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        start = [7] * 20 if index % 5 == 0 else []
        prompts.append((start + pattern * rng.randint(1, 6) + [rng.randrange(3, VOCAB_SIZE)])[:60])
        reads = READS[list(READS)[index % len(READS)]]
        params.append(drawing(index, temperature=0, max_tokens=rng.randint(1, 24), **reads))
    return prompts, params


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    prompts, params = requests()
    return run(plain, params, prompts)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_num_seqs", [256, 3], ids=["together", "few"])
def test_greedy_prompts(folder: Path, expected: list[Any], method: str, max_num_seqs: int) -> None:
    settings = {"model": str(folder), **METHODS[method]} if method == "draft model" else METHODS[method]
    llm = make_tiny_llm(folder, speculative_config=settings, max_num_seqs=max_num_seqs)
    count = 300 if max_num_seqs > 3 else 60
    prompts, params = requests()
    assert_same(run(llm, params[:count], prompts[:count])[0], expected[:count])
    stats = llm.llm_engine.engine_core.stats()
    assert 0 < stats["num_accepted_tokens"] <= stats["num_draft_tokens"]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_alone(folder: Path, plain: LLM, method: str) -> None:
    llm = make_tiny_llm(folder, speculative_config=METHODS[method])
    prompts, _ = requests()
    for index, prompt in enumerate(prompts[:8]):
        params = [drawing(index, temperature=index % 2, max_tokens=40, logprobs=2, logprob_token_ids=[4])]
        assert_same(run(llm, params, [prompt])[0], run(plain, params, [prompt])[0])

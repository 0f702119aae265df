"""A draft model: its guesses change nothing but the number of steps, and its cache follows the request's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model, random_prompts
from scripted_drafters import speculator_of
from test_speculation import assert_same, drawing, run
from tiny_llm import make_tiny_llm

from vllm import LLM

PROMPTS = [*random_prompts(VOCAB_SIZE, (1, 15, 16, 40)), "hello", "x y"]
GREEDY = [drawing(temperature=0, max_tokens=40 + index, logprobs=1, ignore_eos=True) for index in range(6)]
MIXED = [drawing(index, temperature=index % 2, logprobs=2, logprob_token_ids=[5]) for index in range(6)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family, with other weights and a shorter context."""
    folder = tmp_path_factory.mktemp("other")
    make_random_model("qwen2", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=48)
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return make_tiny_llm(folder)


def drafting(folder: Path, draft: Path, num_tokens: int = 4, **fields: Any) -> LLM:
    # Drafts of a model as large as its target do not pay.
    always = [(1, 1024, num_tokens)]
    config = {
        "model": str(draft),
        "num_speculative_tokens": num_tokens,
        "num_speculative_tokens_per_batch_size": always,
    }
    return make_tiny_llm(folder, speculative_config=config, **fields)


def counts(llm: LLM) -> tuple[int, int]:
    """Tokens that were drafted and that were right, since the start."""
    stats = llm.llm_engine.engine_core.stats()
    return stats["num_draft_tokens"], stats["num_accepted_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_tokens": 20},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 12, "max_num_seqs": 4},
        {"tensor_parallel_size": 2},
        {"enforce_eager": True},
    ],
    ids=["usual", "long drafts", "little budget", "preempted", "two ranks", "eager"],
)
def test_a_model_drafts_itself_without_error(folder: Path, plain: LLM, fields: dict[str, Any]) -> None:
    """So its keys and values are right at every position, whatever became of its last drafts."""
    llm = drafting(folder, folder, **fields)
    expected, num_plain = run(plain, GREEDY, PROMPTS)
    for _ in range(2):  # the second time from the prefix cache
        found, num_steps = run(llm, GREEDY, PROMPTS)
        if "tensor_parallel_size" in fields:  # two ranks add up in another order
            assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
        else:
            assert_same(found, expected)
    drafted, accepted = counts(llm)
    assert drafted == accepted > 6 * 20
    assert "max_num_seqs" in fields or num_steps < num_plain / 2
    if "tensor_parallel_size" not in fields:
        assert_same(run(llm, MIXED, PROMPTS)[0], run(plain, MIXED, PROMPTS)[0])
    if "num_gpu_blocks_override" in fields:
        assert llm.llm_engine.engine_core.scheduler.num_preemptions > 0


def test_another_model_drafts(folder: Path, other: Path, plain: LLM) -> None:
    llm = drafting(folder, other)
    for params in (GREEDY, MIXED):
        assert_same(run(llm, params, PROMPTS)[0], run(plain, params, PROMPTS)[0])
    drafted, accepted = counts(llm)
    assert 0 <= accepted < drafted


def test_its_cache_is_freed_and_made_again(folder: Path, plain: LLM) -> None:
    llm = drafting(folder, folder)
    draft = speculator_of(llm.llm_engine.engine_core.executor.worker.model_runner).draft_model
    llm.sleep()
    assert not draft.cache.kv_caches
    llm.wake_up()
    assert_same(run(llm, GREEDY, PROMPTS)[0], run(plain, GREEDY, PROMPTS)[0])
    drafted, accepted = counts(llm)
    assert drafted == accepted > 0


def test_its_cache_takes_part_of_the_memory(folder: Path) -> None:
    memory = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 256}
    with_draft, without = drafting(folder, folder, **memory), make_tiny_llm(folder, **memory)
    num_blocks = [llm.llm_engine.engine_core.executor.num_blocks for llm in (with_draft, without)]
    runner = with_draft.llm_engine.engine_core.executor.worker.model_runner
    assert speculator_of(runner).block_bytes > 0
    assert num_blocks[0] < num_blocks[1]


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    make_random_model("llama", "small", tmp_path / "size", vocab_size=VOCAB_SIZE + 1)
    make_random_model("llama", "small", tmp_path / "end", vocab_size=VOCAB_SIZE, eos_token_id=5)
    with pytest.raises(ValueError, match="another vocabulary than the target: its vocab_size is"):
        drafting(folder, tmp_path / "size")
    with pytest.raises(ValueError, match="another vocabulary than the target: its eos_token_id is"):
        drafting(folder, tmp_path / "end")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        drafting(folder, tmp_path / "nowhere")


def test_a_draft_may_have_windows(folder: Path, plain: LLM, tmp_path: Path) -> None:
    """The target may not: it gives up blocks that the draft needs."""
    make_random_model("mistral", "small", tmp_path, vocab_size=VOCAB_SIZE, sliding_window=8)
    make_byte_tokenizer(tmp_path)
    assert_same(run(drafting(folder, tmp_path), GREEDY, PROMPTS)[0], run(plain, GREEDY, PROMPTS)[0])
    with pytest.raises(ValueError, match="a draft model needs a target with layers that see all tokens"):
        drafting(tmp_path, folder)

"""Models with recurrent states: a state is taken back where a draft was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import make_architecture
from scripted_drafters import following, speculate
from test_state_models import assert_equal_bits, make_llm, random_prompts, run
from test_state_prefixes import assert_no_leak

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
READS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)
FEW = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)
DRAWS = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, detokenize=False, logprobs=3, repetition_penalty=1.2)


@pytest.fixture(scope="module", params=["lfm3", "qwen3_next", "mamba2", "jamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_architecture(request.param, folder, max_position_embeddings=768)
    return folder


@pytest.mark.parametrize("fields", [{}, {"mamba_block_size": 16, "num_gpu_blocks_override": 14, "max_num_seqs": 3}])
def test_as_without_drafts(folder: Path, fields: dict) -> None:
    prompts = random_prompts((1, 17, 40))
    params = [READS, DRAWS, READS]
    expected = run(make_llm(folder, **fields), prompts, params)
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in expected]
    right = following(texts)
    further = run(make_llm(folder), [texts[2]], FEW)
    llm = make_llm(folder, **fields, speculative_config=NGRAM)
    assert_equal_bits(run(llm, prompts, params), expected)
    for guess in (
        right,
        lambda tokens, room: [3] * room,
        lambda tokens, room: [*right(tokens, room)[: len(tokens) % 5], 3],
    ):
        speculate(llm, guess)
        assert llm.reset_prefix_cache()
        assert_equal_bits(run(llm, prompts, params), expected)
        # Cached states are those of accepted tokens.
        assert_equal_bits(run(llm, [texts[2]], FEW), further)
        assert_no_leak(llm)


def test_states_are_saved_at_borders(folder: Path) -> None:
    llm = make_llm(folder, mamba_block_size=16, speculative_config=NGRAM)
    speculate(llm, None)
    (expected,) = run(llm, random_prompts((40,)), READS)
    text = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    for draft in (following([text]), lambda tokens, room: [3] * room):
        assert llm.reset_prefix_cache()
        speculate(llm, draft)
        assert_equal_bits(run(llm, random_prompts((40,)), READS), [expected])
        assert run(llm, [text], FEW)[0].num_cached_tokens == 64  # all whole blocks before the last token


def test_each_request_has_a_backup(folder: Path) -> None:
    llm: LLM = make_llm(folder, speculative_config=NGRAM, max_num_seqs=5)
    slots = llm.llm_engine.engine_core.executor.state_slots
    assert slots.num_backups == slots.num_requests == 5


def test_a_model_with_states_does_not_draft(folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot draft, as its layers have recurrent states"):
        make_llm(folder, speculative_config={"model": str(folder), "num_speculative_tokens": 2})

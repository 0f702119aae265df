"""The prefix cache of models with recurrent states: hits have the bits of what made them; nothing is computed twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import make_architecture
from guests import guest_of
from test_state_models import assert_equal_bits, make_llm, random_prompts, run
from tiny_llm import is_empty

from vllm import LLM, BeamSearchParams, SamplingParams
from vllm.selftest.invariance import InvarianceTest
from vllm.v1.features.states import memory as state_memory
from vllm.v1.features.states.scheduler import Snapshots

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 16
READS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)
READS_PROMPT = SamplingParams(
    max_tokens=2, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprob_token_ids=[3, 7]
)


@pytest.fixture(scope="module", params=["lfm2", "lfm3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models without and with windows."""
    folder = tmp_path_factory.mktemp(request.param)
    make_architecture(request.param, folder, max_position_embeddings=768)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    """An engine that caches nothing."""
    return make_llm(folder, enable_prefix_caching=False)


def cached_tokens(outputs: list[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def assert_no_leak(llm: LLM) -> None:
    """Nothing is left of requests, and each snapshot is either free or found."""
    assert is_empty(llm)
    guest = guest_of(llm.llm_engine.engine_core.scheduler, Snapshots)
    assert not (guest._counted or guest._num_waiting or guest._save_at or guest._last_saved)
    snapshots = guest.pool
    held = [*snapshots._unused, *snapshots._snapshot_of.values()]
    assert sorted(held) == list(range(snapshots.num_snapshots)) and not snapshots._saved
    assert llm.llm_engine.reset_prefix_cache() and len(snapshots) == 0


def test_each_border_is_begun_from(folder, plain) -> None:
    """With a snapshot every 16 tokens, a prompt that parts at any token begins from the border before it."""
    (prompt,) = random_prompts((100,))
    llm = make_llm(folder, mamba_block_size=BLOCK)
    run(llm, [prompt], READS)
    assert guest_of(llm.llm_engine.engine_core.scheduler, Snapshots).pool.usage > 0
    for parts_at in (15, 16, 17, 31, 48, 95, 96, 99):
        other = prompt[:parts_at] + random_prompts((9,), seed=parts_at)[0]
        (output,) = run(llm, [other], READS)
        assert output.num_cached_tokens == parts_at // BLOCK * BLOCK
        assert_equal_bits([output], run(plain, [other], READS))
    (again,) = run(llm, [prompt], READS)
    assert again.num_cached_tokens == 96
    assert_equal_bits([again], run(plain, [prompt], READS))
    assert_no_leak(llm)


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 24}, {"mamba_block_size": 32}])
def test_a_shared_prefix_is_computed_once(folder, plain, fields) -> None:
    (prefix,) = random_prompts((130,))
    prompts = [prefix + suffix for suffix in random_prompts(tuple(3 + index % 20 for index in range(24)), seed=4)]
    llm = make_llm(folder, max_num_seqs=16, **fields)
    outputs = run(llm, prompts, READS)
    assert_equal_bits(outputs, run(plain, prompts, READS))
    cached = cached_tokens(outputs)
    assert cached[0] == 0 and min(cached[1:]) >= 128
    assert_no_leak(llm)


def test_prompts_that_part_at_several_places(folder, plain) -> None:
    root, left, right = random_prompts((50, 40, 70), seed=6)
    ends = random_prompts((5, 9, 30, 2, 17, 8), seed=7)
    prompts = [root + branch + end for branch in (left, right) for end in ends]
    llm = make_llm(folder)
    outputs = run(llm, prompts, READS_PROMPT)
    assert_equal_bits(outputs, run(plain, prompts, READS_PROMPT))
    cached = cached_tokens(outputs)
    assert cached[0] == 0 and cached[6] == 48 and min(cached[1:6]) >= 80 and min(cached[7:]) >= 112
    # Once more: prompts that are read, too, begin from what is cached.
    again = run(llm, prompts, READS_PROMPT)
    assert_equal_bits(again, outputs)
    assert min(cached_tokens(again)) >= 80
    assert_no_leak(llm)


def test_the_end_of_a_prompt_is_kept(folder, plain) -> None:
    """A further turn begins where the last turn's prompt ended."""
    (prompt,) = random_prompts((150,), seed=9)
    llm = make_llm(folder)
    (first,) = run(llm, [prompt], READS)
    turn = prompt + list(first.outputs[0].token_ids) + random_prompts((30,), seed=10)[0]
    (second,) = run(llm, [turn], READS)
    assert second.num_cached_tokens == 144
    assert_equal_bits([second], run(plain, [turn], READS))


def test_few_snapshots_and_few_blocks(folder, plain, monkeypatch) -> None:
    """Evictions and preemptions change no bit."""
    monkeypatch.setattr(state_memory, "_MOST_SNAPSHOTS", 3)
    prefix, *tails = random_prompts((60, *(4 + 7 * index for index in range(12))), seed=11)
    prompts = [prefix[: 60 - 5 * index] + tail for index, tail in enumerate(tails)]
    params = READS.clone()
    params.max_tokens = 20
    llm = make_llm(folder, num_gpu_blocks_override=24, mamba_block_size=BLOCK, max_model_len=192)
    expected = run(plain, prompts, params)
    for _ in range(2):
        assert_equal_bits(run(llm, prompts, params), expected)
    assert llm.llm_engine.engine_core.scheduler.num_preemptions > 0
    assert_no_leak(llm)


def test_blocks_come_back_from_the_host(folder, plain) -> None:
    prompts = random_prompts((90, 80, 85, 95), seed=12)
    num_blocks = 24 if folder.name.startswith("lfm3") else 12
    llm = make_llm(folder, num_gpu_blocks_override=num_blocks, swap_space=0.01, max_model_len=128)
    run(llm, prompts, READS)
    outputs = run(llm, prompts, READS)
    assert_equal_bits(outputs, run(plain, prompts, READS))
    assert llm.llm_engine.engine_core.scheduler.stats().num_swapped_in_blocks > 0
    assert min(cached_tokens(outputs)) > 0
    assert_no_leak(llm)


def test_random_requests_and_aborts_leak_nothing(folder, monkeypatch) -> None:
    monkeypatch.setattr(state_memory, "_MOST_SNAPSHOTS", 5)
    rng = random.Random(3)
    llm = make_llm(folder, num_gpu_blocks_override=40, max_model_len=192, max_num_batched_tokens=64, max_num_seqs=8)
    engine, bases, alive = llm.llm_engine, random_prompts((100, 60, 30), seed=13), []
    for number in range(1000):
        base = rng.choice(bases)
        prompt = base[: rng.randrange(1, len(base))] + random_prompts((rng.randrange(1, 20),), seed=number)[0]
        params = rng.choice((READS, READS_PROMPT)).clone()
        params.max_tokens = rng.choice((0, 1, 1, 5, 20))
        if not params.max_tokens:
            params = READS_PROMPT.clone()
            params.max_tokens = 0
        alive.append(str(number))
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        if rng.random() < 0.2:
            engine.abort_request([alive.pop(rng.randrange(len(alive)))])
        for _ in range(rng.choice((0, 1, 1, 2))):
            for output in engine.step():
                assert output.outputs[0].logprobs is None or np.isfinite(output.outputs[0].logprobs.logprobs).all()
    while engine.has_unfinished_requests():
        engine.step()
    assert_no_leak(llm)


def test_selftest_finds_the_same_bits_in_all_compositions(folder, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    llm = make_llm(folder, dtype="bfloat16", max_logprobs=-1, max_logprob_token_ids=-1, max_model_len=128)
    checks = list(InvarianceTest(llm.llm_engine).run())
    assert [check for check in checks if not check.passed] == [] and len(checks) > 10
    assert_no_leak(llm)


def test_pooled_tokens_come_from_the_cache_too(folder) -> None:
    prompts = random_prompts((70, 40), seed=15)
    prompts.append(prompts[0][:60] + prompts[1])
    embeddings = []
    for caches in (False, True):
        llm = make_llm(folder, runner="pooling", enable_prefix_caching=caches)
        for _ in range(2):
            outputs = llm.encode([{"prompt_token_ids": each} for each in prompts], pooling_task="token_embed")
            embeddings.append([output.outputs.data for output in outputs])
        assert (max(output.num_cached_tokens for output in outputs) > 0) == caches
    for others in embeddings[1:]:
        assert all(own.equal(other) for own, other in zip(embeddings[0], others, strict=True))


def test_labels_of_several_tokens(folder, plain) -> None:
    prompts, labels = random_prompts((70, 5, 70), seed=16), [[5], [5, 6], [5, 6, 7, 8], [9, 5]]
    llm = make_llm(folder)
    got, want = (each.score_labels(prompts, labels, use_tqdm=False) for each in (llm, plain))
    assert [scores.logprobs.tolist() for scores in got] == [scores.logprobs.tolist() for scores in want]
    assert_no_leak(llm)


def test_beams(folder, plain) -> None:
    llm = make_llm(folder)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((70, 5), seed=14)]
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    got, want = (each.beam_search(prompts, beams) for each in (llm, plain))
    for own, other in zip(got, want, strict=True):
        assert [beam.tokens for beam in own.sequences] == [beam.tokens for beam in other.sequences]
        assert [beam.cum_logprob for beam in own.sequences] == [beam.cum_logprob for beam in other.sequences]
    assert_no_leak(llm)

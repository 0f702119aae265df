"""Latent attention in an engine: what shares its cache, how little of it there is, its dtype and the weights' kinds."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from layouts import needs_kernels
from models_util import ALONE, hf_logits, load_model, paged_logits, random_prompts
from thread_ranks import make_thread_llm
from torch import nn

from vllm import LLM, SamplingParams
from vllm.attention.backend import PagedAttention
from vllm.layers import latent_attention as layers
from vllm.layers.kv_cache_spec import KVCacheSpec, kv_cache_specs
from vllm.layers.latent_attention import LatentAttention
from vllm.models.registry import resolve_model_class
from vllm.ops.kv_cache import as_cached
from vllm.selftest.invariance import InvarianceTest

PARAMS = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("latent")
    return folder, make_architecture("youtu", folder)


def make_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), **({"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 120} | fields))


def make_prompts() -> list[dict[str, list[int]]]:
    generator = random.Random(0)
    stem = [generator.randrange(VOCAB_SIZE) for _ in range(70)]
    return [
        {"prompt_token_ids": stem[: generator.randrange(5, 70)] + [generator.randrange(VOCAB_SIZE) for _ in range(5)]}
        for _ in range(6)
    ]


def read(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[tuple[Any, np.ndarray]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [(list(out.outputs[0].token_ids), out.outputs[0].logprobs.logprobs) for out in outputs]


def test_a_cache_of_deepseek_v3_takes_less_than_a_tenth() -> None:
    layers = nn.ModuleList([LatentAttention(512 + 64, 192**-0.5)] * 61)
    config = SimpleNamespace(num_key_value_heads=128, head_dim=192, num_hidden_layers=61)
    (latent, *_) = kv_cache_specs(layers, config, ALONE)
    assert latent.values_per_token == 576
    num_blocks, block_size = 4096 // 16, 16
    shapes = latent.cache_shapes(PagedAttention(), num_blocks, block_size)
    assert sum(map(np.prod, shapes)) == 4096 * 576
    widened = KVCacheSpec(128, 192).cache_shapes(PagedAttention(), num_blocks, block_size)
    assert 10 * sum(map(np.prod, shapes)) < sum(map(np.prod, widened))


@needs_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_few_blocks_cached_prefixes_chunks_and_swapping_change_no_bit(made: Any, kv_cache_dtype: str) -> None:
    folder, _ = made
    ample = make_llm(folder, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
    expected = [read(ample, [prompt])[0] for prompt in make_prompts()]
    tight: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 32}
    for fields in (tight, tight | {"swap_space": 1e-3}, {"async_scheduling": True, "enforce_eager": True}):
        llm = make_llm(folder, kv_cache_dtype=kv_cache_dtype, **fields)
        for _ in range(2):
            for (tokens, logprobs), (other_tokens, others) in zip(read(llm, make_prompts()), expected, strict=True):
                assert tokens == other_tokens
                np.testing.assert_array_equal(logprobs, others)
        scheduler = llm.llm_engine.engine_core.scheduler
        assert scheduler.kv.stats.num_prefix_hit_tokens > 0
        if "num_gpu_blocks_override" in fields:
            assert scheduler.num_preemptions > 0
        if "swap_space" in fields:
            assert scheduler.stats().num_swapped_in_blocks > 0


def test_a_cache_of_eight_bits_holds_rounded_rows(made: Any) -> None:
    """transformers' model, whose latents and rotated keys are rounded where it would cache them."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            rounded = (as_cached(x, torch.float8_e4m3fn, 1.0).float() for x in (key_states, value_states))
            return super().update(*rounded, *args, **kwargs)

    folder, model = made
    prompts = random_prompts(VOCAB_SIZE, (5, 37))
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)
    llm = make_llm(folder, kv_cache_dtype="fp8", max_logprobs=-1)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        with torch.no_grad():
            rounded, plain = (
                model(torch.tensor([prompt]), cache=cache).logits[0, -1].log_softmax(-1) for cache in (Rounding(), None)
            )
        entries = output.outputs[0].logprobs[0]
        got = torch.tensor([entries[token].logprob for token in range(VOCAB_SIZE)])
        torch.testing.assert_close(got, rounded, atol=1e-4, rtol=0)
        assert (plain - rounded).abs().max() > 1e-2


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_long_prompts_are_widened(made: Any, monkeypatch: pytest.MonkeyPatch, chunk: int | None, dtype: str) -> None:
    """Latents of a step with many tokens are widened, and former steps' too; beside others that are not."""
    folder, model = made
    widened: list[int] = []
    attend = LatentAttention._attend_request

    def count(self: LatentAttention, q: Any, *args: Any) -> Any:
        widened.append(len(q))
        return attend(self, q, *args)

    monkeypatch.setattr(layers, "WIDENS_FROM", 8)
    monkeypatch.setattr(LatentAttention, "_attend_request", count)
    ours, config = load_model(folder, dtype, max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    prompts = random_prompts(VOCAB_SIZE, (3, 40, 37, 7))
    got = torch.cat(paged_logits(ours, config, prompts, chunk, dtype=dtype))
    truth = torch.cat(hf_logits(model, prompts))
    # Each of four layers: chunks of 16 but the last ones of 8 and 5 tokens, or both long prompts at once.
    assert sorted(widened) == sorted(4 * ([16, 16, 8, 16, 16] if chunk else [40, 37]))
    if dtype == "float32":
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-5 * float(truth.std()) + 1e-5)
        return
    half = copy.deepcopy(model).bfloat16()
    theirs = (torch.cat(hf_logits(half, prompts)).float() - truth).abs().amax(-1).median()
    assert (got.float() - truth).abs().amax(-1).median() <= 1.2 * theirs


@needs_kernels
def test_no_prompt_is_widened_where_bits_may_not_follow_the_batch(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(layers, "WIDENS_FROM", 8)
    folder, _ = made
    llm = make_llm(folder, max_logprobs=-1, max_logprob_token_ids=-1)
    checks = list(InvarianceTest(llm.llm_engine).run())
    assert len(checks) > 3 and [check.name for check in checks if not check.passed] == []


@needs_kernels
def test_rows_of_eight_bits_are_widened_as_they_are(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    expected = read(make_llm(folder, kv_cache_dtype="fp8"), make_prompts())
    monkeypatch.setattr(layers, "WIDENS_FROM", 8)
    for (tokens, logprobs), (others, wanted) in zip(
        read(make_llm(folder, kv_cache_dtype="fp8"), make_prompts()), expected, strict=True
    ):
        assert tokens == others
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


def test_every_rank_has_whole_rows_and_its_heads(made: Any) -> None:
    folder, _ = made
    alone, together = make_llm(folder), make_thread_llm(folder, 2, skip_tokenizer_init=True, max_model_len=120)
    runner = together.llm_engine.engine_core.executor.worker.model_runner
    assert {cache.shape[2] for (cache,) in runner.kv_caches} == {26}
    for (tokens, logprobs), (others, expected) in zip(
        *(read(llm, make_prompts()) for llm in (alone, together)), strict=True
    ):
        assert tokens == others
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    together.llm_engine.engine_core.executor.shutdown()


def test_new_weights(made: Any) -> None:
    folder, model = made
    ours, config = load_model(folder, "float32", max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    prompts = random_prompts(VOCAB_SIZE, (5, 20))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    changed = dict(model.state_dict())
    before, changed[name] = changed[name].clone(), changed[name].flip(0).clone()
    ours.load_weights([(name, changed[name])])
    model.load_state_dict(changed)
    try:
        for got, want in zip(paged_logits(ours, config, prompts), hf_logits(model, prompts), strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    finally:
        model.load_state_dict(changed | {name: before})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attention_backend": "varlen"}, "attention_backend='varlen'"),
        ({"hf_overrides": {"num_key_value_heads": 2}}, "num_key_value_heads=2 is not supported: latent attention has"),
        ({"hf_overrides": {"kv_lora_rank": None}}, "has no kv_lora_rank"),
        ({"hf_overrides": {"index_topk": 64}}, "YoutuForCausalLM has no option index_topk"),
    ],
)
def test_what_there_is_not_is_refused(made: Any, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_llm(made[0], **fields)

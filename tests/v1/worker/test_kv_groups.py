"""An engine with several KV groups: what shares its cache, and how little of it there is, changes no result."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from models_util import make_random_model
from pretend_cuda import pretending

from vllm import LLM, SamplingParams
from vllm.config.cache import Chunks

SEEN = {"windows": 20, "chunks": Chunks(20)}


@pytest.fixture(scope="module", params=SEEN)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "chunks":
        sizes = {"moe_layers": [], "intermediate_size_mlp": 96, "no_rope_layer_interval": 2}
        return make_random_model("llama4_text", "small", path, num_hidden_layers=4, attention_chunk_size=20, **sizes)[0]
    kinds = {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"] * 2}
    return make_random_model("mistral", "small", path, num_hidden_layers=4, **kinds)[0]


def make_llm(folder, **options):
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=200, seed=0, **options)


def make_prompts():
    generator = random.Random(0)
    stem = [generator.randrange(199) for _ in range(90)]
    return [
        {"prompt_token_ids": stem[: generator.randrange(5, 90)] + [generator.randrange(199) for _ in range(5)]}
        for _ in range(12)
    ]


def results(llm, prompts):
    params = SamplingParams(max_tokens=40, temperature=0.0, logprob_token_ids=[3, 5], detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [[step[3].logprob for step in output.outputs[0].logprobs] for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], rows


@pytest.fixture(scope="module")
def expected(folder):
    """Each prompt alone, uncached."""
    ample = make_llm(folder, enable_prefix_caching=False)
    alone = [results(ample, [prompt]) for prompt in make_prompts()]
    return [tokens for (tokens,), _ in alone], [rows for _, (rows,) in alone]


def check(llm, expected):
    tokens, rows = results(llm, make_prompts())
    assert tokens == expected[0]
    for own, other in zip(rows, expected[1], strict=True):
        # float32, with products over other numbers of rows.
        assert own == pytest.approx(other, abs=1e-4)


def test_few_blocks_and_cached_prefixes_change_nothing(folder, expected):
    # One request of max_model_len needs 13 blocks without a window, and 5 with one and a step of 32 tokens.
    tight = make_llm(folder, num_gpu_blocks_override=30, max_num_batched_tokens=32)
    scheduler = tight.llm_engine.engine_core.scheduler
    for _ in range(2):
        check(tight, expected)
    windows = [group.window for group in scheduler.kv.groups]
    assert windows == [None, next(seen for name, seen in SEEN.items() if name in folder.name)]
    assert scheduler.num_preemptions > 0 and scheduler.kv.stats.num_prefix_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": True},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 32, "swap_space": 0.01},
    ],
    ids=["two ranks", "two ranks ahead", "async", "swap"],
)
def test_ranks_async_scheduling_and_swapping_change_nothing(folder, expected, options):
    llm = make_llm(folder, **options)
    for _ in range(2):
        check(llm, expected)
    if "swap_space" in options:
        assert llm.llm_engine.engine_core.scheduler.stats().num_swapped_in_blocks > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended where there is no device")
def test_decode_steps_of_several_groups_are_replayed(folder, expected):
    with pretending():
        llm = make_llm(folder, device="cuda", max_num_seqs=4, gpu_memory_utilization=0.3)
        steps = llm.llm_engine.engine_core.executor.worker.model_runner.replay.steps
        num_replays = Counter()
        for step in steps.steps:
            step.replay = lambda size=step.size, replay=step.replay: (num_replays.update([size]), replay())
        check(llm, expected)
    # 12 prompts, 4 at a time, have 40 tokens each; the first ones come from the prompts' steps.
    assert num_replays.total() > 80

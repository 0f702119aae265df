"""Models that are split by layers: the same bits as of one process, for every kind of layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from thread_stages import make_staged_llm

from vllm import LLM, SamplingParams
from vllm.layers.weight_update import held_tensors
from vllm.loader import weights
from vllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

READS = SamplingParams(
    max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprob_token_ids=[3, 7]
)
FIELDS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    # Prompts come in parts, beside others' decode steps.
    "max_num_batched_tokens": 32,
}
# One of each kind of block, mixer, position and group of blocks.
KINDS = (
    "llama qwen3 opt gpt2 gptj falcon gemma2 gemma3 olmo2 cohere phi mpt-six-heads bloom ministral mixtral qwen3_moe "
    "gpt_oss deepseek_v3 laguna lfm2 qwen3_next falcon_h1 mamba2 jamba granite_hybrid"
).split()


def prompts() -> list[list[int]]:
    """The last begins as the one before it does."""
    generator = torch.Generator().manual_seed(5)
    short, long, tail = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 49, 10))
    return [short, long, long[:33] + tail]


def run(llm: LLM, params: SamplingParams = READS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)


def bits(output: RequestOutput) -> list[np.ndarray]:
    """All readings of an output."""
    own = output.outputs[0]
    arrays = [np.array(own.token_ids), own.logprobs.logprobs, own.logprobs.logits, own.logprobs.ranks]
    return [*arrays, output.prompt_logprobs.logprobs, output.prompt_logprobs.logits]


def assert_equal_bits(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(got, expected, strict=True):
        for own, wanted in zip(bits(mine), bits(other), strict=True):
            np.testing.assert_array_equal(own, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_stages_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    make_architecture(name, tmp_path)
    expected = run(LLM(str(tmp_path), **FIELDS))
    staged = make_staged_llm(tmp_path, 2, **FIELDS)
    assert_equal_bits(run(staged), expected)
    # From the prefix cache.
    assert_equal_bits(run(staged), expected)
    staged.llm_engine.engine_core.shutdown()


_TAKES_MORE = "has layers that take more than the rows of the layer before"


@pytest.mark.parametrize(
    ("name", "overrides", "problem"),
    [
        ("gemma3n", {}, _TAKES_MORE),
        ("zamba2", {}, _TAKES_MORE),
        ("gemma4", {}, _TAKES_MORE),
        ("gemma4", {"hidden_size_per_layer_input": 0}, "has layers that read other layers' keys and values"),
    ],
)
def test_models_that_are_not_split(name: str, overrides: dict, problem: str, tmp_path: Path) -> None:
    make_architecture(name, tmp_path, **overrides)
    with pytest.raises(ValueError, match=f"pipeline_parallel_size: .* {problem}.*: use tensor_parallel_size"):
        LLM(str(tmp_path), pipeline_parallel_size=2, **FIELDS)


def test_a_stage_has_its_layers_alone(tmp_path: Path) -> None:
    make_architecture("llama", tmp_path, tie_word_embeddings=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", "1,2,1")
        staged = make_staged_llm(tmp_path, 3, **FIELDS)
    executor = staged.llm_engine.engine_core.executor
    whole = LLM(str(tmp_path), **FIELDS).llm_engine.engine_core.executor.worker.model_runner
    last, middle, first = (worker.model_runner for worker in executor.workers)
    for runner, layers in (first, [0]), (middle, [1, 2]), (last, [3]):
        names = {name for name, _ in runner.model.named_modules() if name.endswith("qkv_proj")}
        assert names == {f"model.layers.{layer}.self_attn.qkv_proj" for layer in layers}
        assert len(runner.kv_caches) == len(layers)
    assert len(whole.kv_caches) == 4
    assert hasattr(first.model.model.embed_tokens, "rows") and not hasattr(last.model.model.embed_tokens, "rows")
    assert hasattr(last.model.lm_head, "packed") and not hasattr(first.model.lm_head, "packed")
    # Every tensor has one place, and none is in two stages.
    sizes = [sum(each.nbytes for each in held_tensors(runner.model.model.layers)) for runner in (first, middle, last)]
    assert sum(sizes) == sum(each.nbytes for each in held_tensors(whole.model.model.layers))
    staged.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "bloom", "mpt"])
def test_other_stages_tensors_are_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_architecture(name, tmp_path)
    taken: list[str] = []
    kept = weights.checkpoint_parts
    monkeypatch.setattr(
        weights, "checkpoint_parts", lambda model, key, value: (taken.append(key), kept(model, key, value))[1]
    )
    whole = LLM(str(tmp_path), **FIELDS)
    of_layers = {key for key in taken if re.search(r"\.\d+\.", key)}
    taken.clear()
    staged = make_staged_llm(tmp_path, 2, **FIELDS)
    # By neither stage twice, and by both together once.
    assert of_layers and sorted(key for key in taken if key in of_layers) == sorted(of_layers)
    for llm in whole, staged:
        llm.llm_engine.engine_core.shutdown()


def test_made_up_weights_are_the_same_in_stages(tmp_path: Path) -> None:
    make_architecture("qwen3_moe", tmp_path)
    fields = {**FIELDS, "load_format": "dummy"}
    staged = make_staged_llm(tmp_path, 2, **fields)
    assert_equal_bits(run(staged), run(LLM(str(tmp_path), **fields)))
    staged.llm_engine.engine_core.shutdown()

"""Families over two ranks or more, and in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import make_architecture
from models_util import hf_logits, load_model, paged_logits, random_prompts
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm

from vllm import SamplingParams
from vllm.models.registry import resolve_model_class

PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=0, ignore_eos=True, detokenize=False)


# Fused weights; one key head for all ranks; ALiBi; windows; biases; norms over the whole width, some over shared heads;
# norms before the output projections; norms of each head, with interleaved rotation; head biases; sinks;
# sparse gates; layers with fewer key heads than others; latent attention, with queries from a latent and without.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("phi3", 2),
        ("gpt_bigcode", 2),
        ("bloom", 2),
        ("mistral", 2),
        ("gpt2", 2),
        ("olmo2", 4),
        ("bitnet", 2),
        ("cohere-qk-norm", 4),
        ("stablelm-12b", 2),
        ("phi", 2),
        ("falcon-7b", 4),
        ("granite_swa", 2),
        ("gemma3n", 2),
        ("gemma4-values-are-keys", 2),
        ("youtu", 2),
        ("youtu-plain-queries", 4),
    ],
)
def test_ranks_together_compute_what_one_does(name: str, world_size: int, tmp_path: Path) -> None:
    make_architecture(name, tmp_path)
    fields = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_model_len": 64}
    alone, together = make_tiny_llm(tmp_path, **fields), make_thread_llm(tmp_path, world_size, **fields)
    prompts = random_prompts(131, (1, 16, 37))
    outputs = [llm.generate(prompts, PARAMS, use_tqdm=False) for llm in (alone, together)]
    together.llm_engine.engine_core.executor.shutdown()
    for prompt, own, other in zip(prompts, *outputs, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, theirs in zip(own.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            for token, entry in mine.items():
                assert entry.rank == theirs[token].rank
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
        for position in range(1, len(prompt)):
            token = prompt[position]
            got = own.prompt_logprobs[position][token].logprob
            assert got == pytest.approx(other.prompt_logprobs[position][token].logprob, abs=1e-4)


def test_streams_of_a_batch_have_the_bits_of_one_prompt(tmp_path: Path) -> None:
    """Gemma 3n's activations stand between products, with rows that are no multiple of a vector."""
    make_architecture("gemma3n", tmp_path)
    llm = make_tiny_llm(tmp_path, skip_tokenizer_init=True, max_model_len=64)
    prompts = random_prompts(131, (3, 16, 37, 16))
    together = llm.generate(prompts, PARAMS, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        assert llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].logprobs == output.outputs[0].logprobs


@pytest.mark.parametrize(
    "name",
    ["gpt2", "gptj", "gemma2", "gemma3", "nemotron", "olmo2", "bloom", "cohere-qk-norm", "gemma3n", "gemma4", "youtu"],
)
def test_bfloat16_is_as_near_the_truth_as_transformers(name: str, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path)
    ours, config = load_model(tmp_path, "bfloat16", max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    prompts = random_prompts(131, (5, 37))
    truth = hf_logits(model, prompts)
    half = hf_logits(model.bfloat16(), prompts)
    got = paged_logits(ours, config, prompts, 7, dtype="bfloat16")
    my_error = torch.cat([(a - b).abs() for a, b in zip(got, truth, strict=True)]).square().mean().sqrt()
    their_error = torch.cat([(a.float() - b).abs() for a, b in zip(half, truth, strict=True)]).square().mean().sqrt()
    # Both round each product's result; the sums of the two are in different orders.
    assert my_error <= 1.2 * their_error

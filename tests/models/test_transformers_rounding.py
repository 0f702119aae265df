"""rounding="transformers" and "autocast": in half precision, logprobs are those of transformers' forward over the whole
sequence, however the engine divides it over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_tiny, tiny_config

from vllm import LLM, SamplingParams
from vllm.models.transformers.eager import FEWEST_ROWS, eager_attention
from vllm.models.transformers.experts import run_experts
from vllm.selftest.trainer import LIMIT, Sampled, Trainer, make_prompts, sample

MAX_TOKENS = 6
# Equal logits, whose log-sum-exps are float32 here and float64 there.
TOLERANCE = 3e-6


def start(folder: Path, rounding: str, **fields: Any) -> LLM:
    dtype = "float32" if rounding == "autocast" else "bfloat16"
    usual = {"dtype": dtype, "max_model_len": 64, "model_impl": "transformers", "rounding": rounding}
    return LLM(str(folder), skip_tokenizer_init=True, **{**usual, **fields})


def sampled_by(llm: LLM) -> list[Sampled]:
    engine = llm.llm_engine
    return sample(engine, make_prompts(engine, 2, MAX_TOKENS, seed=0), MAX_TOKENS, 1.0, seed=0)


def farthest(sampled: list[Sampled], folder: Path, kind: str) -> float:
    trainer = Trainer(str(folder), kind, attn_implementation="eager").logprobs(sampled, 1.0)
    return max(float(np.abs(own - each.logprobs).max()) for own, each in zip(trainer, sampled, strict=True))


def rows_stand_alone() -> bool:
    """Whether the sums of PyTorch's products of bfloat16 do not follow the number of rows on this machine."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (70, 96))
    whole = F.linear(x, weight)
    return all(F.linear(x[:count], weight).equal(whole[:count]) for count in (2, 3, 17, 40))


same_sums = pytest.mark.skipif(not rows_stand_alone(), reason="PyTorch's sums follow the batch on this CPU")


@same_sums
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "arcee", "gpt_oss"])
@pytest.mark.parametrize(("rounding", "kind"), [("transformers", "bfloat16"), ("autocast", "autocast")])
def test_logprobs_are_a_trainers(model_type: str, rounding: str, kind: str, tmp_path: Path) -> None:
    # A trainer's own sums differ where an expert has a single token of the sequence: each has most.
    make_tiny(model_type, tmp_path, **({"num_experts_per_tok": 3} if model_type == "gpt_oss" else {}))
    # Prompts of several steps, which are shared with other requests' outputs.
    llm = start(tmp_path, rounding, max_num_batched_tokens=24)
    sampled = sampled_by(llm)
    assert farthest(sampled, tmp_path, kind) < TOLERANCE
    again = sampled_by(llm)  # over the cached blocks
    assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in zip(sampled, again, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_experts_of_few_tokens_add_as_those_of_many(count: int) -> None:
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    generator = torch.Generator().manual_seed(0)
    module = GptOssExperts(tiny_config("gpt_oss")).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden, chances = (torch.randn(90, width, generator=generator) for width in (64, module.num_experts))
    weights, chosen = chances.softmax(-1).topk(2)
    assert chosen.unique(return_counts=True)[1].min() >= FEWEST_ROWS
    whole = grouped_mm_experts_forward(module, hidden, chosen, weights)
    for start in range(0, 90, count):
        few = slice(start, start + count)
        assert run_experts(module, hidden[few], chosen[few], weights[few]).equal(whole[few])


def test_without_it_they_are_not(tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path)
    assert farthest(sampled_by(start(tmp_path, "vllm")), tmp_path, "bfloat16") > LIMIT


@same_sums
def test_prompts_are_read_with_rounded_logits(tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path)
    llm = start(tmp_path, "transformers", max_logprobs=-1)
    prompt = make_prompts(llm.llm_engine, 1, MAX_TOKENS, seed=3)[-1]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    read = [row[token].logprob for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    assert farthest([Sampled(prompt[:1], prompt[1:], np.array(read))], tmp_path, "bfloat16") < TOLERANCE


@same_sums
def test_new_weights_are_a_trainers_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make_tiny("qwen3", tmp_path / "old")
    make_tiny("qwen3", tmp_path / "new", seed=1)
    llm = start(tmp_path / "old", "transformers")
    sampled_by(llm)
    llm.collective_rpc("update_weights", args=(list(load_file(tmp_path / "new" / "model.safetensors").items()),))
    assert farthest(sampled_by(llm), tmp_path / "new", "bfloat16") < TOLERANCE


@pytest.mark.parametrize(
    ("rounding", "fields", "needs"),
    [
        ("transformers", {"model_impl": "auto"}, "model_impl='transformers'"),
        ("transformers", {"quantization": "int8"}, "an unquantised checkpoint"),
        ("transformers", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='auto'"),
        ("transformers", {"enable_lora": True}, "enable_lora=False"),
        ("autocast", {"dtype": "bfloat16"}, "dtype='float32'"),
    ],
)
def test_what_would_round_otherwise_is_refused(
    rounding: str, fields: dict[str, Any], needs: str, tmp_path: Path
) -> None:
    make_tiny("qwen3", tmp_path)
    with pytest.raises(ValueError, match=f"rounding='{rounding}' needs {needs}"):
        start(tmp_path, rounding, **fields)


def test_modules_without_eager_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="eager_attention_forward, which the file of Linear lacks"):
        eager_attention(torch.nn.Linear(1, 1))

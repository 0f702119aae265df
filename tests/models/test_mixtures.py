"""Mixtures of experts in every way that the engine may run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_architecture
from mixtures import MIXTURES
from models_util import hf_logits, load_model, paged_logits, random_prompts
from safetensors.torch import load_file, save_file
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm

from vllm import SamplingParams
from vllm.models.registry import resolve_model_class
from vllm.selftest.invariance import InvarianceTest

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=0, ignore_eos=True, detokenize=False)
PROMPTS = random_prompts(131, (1, 16, 37))


def generate(llm: Any) -> list[Any]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def assert_same(ours: list[Any], expected: list[Any], tolerance: float) -> None:
    for own, other, prompt in zip(ours, expected, PROMPTS, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, theirs in zip(own.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=tolerance)
        for position in range(1, len(prompt)):
            token = prompt[position]
            got = own.prompt_logprobs[position][token].logprob
            assert got == pytest.approx(other.prompt_logprobs[position][token].logprob, abs=tolerance)


# A shared MLP, and the same by a gate; biases; none of them; latent attention; heads that differ by layer; branches;
# chunks; mixtures of heads; experts that give what they take.
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_moe", "glm4_moe", "gpt_oss", "mixtral", "deepseek_v3", "mimo_v2_flash", "gemma4-experts"),
        *("llama4", "jetmoe", "longcat_flash"),
    ],
)
def test_ranks_share_the_experts(name: str, tmp_path: Path) -> None:
    make_architecture(name, tmp_path)
    fields = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_model_len": 64}
    together = make_thread_llm(tmp_path, 2, **fields)
    outputs = generate(together)
    together.llm_engine.engine_core.executor.shutdown()
    assert_same(outputs, generate(make_tiny_llm(tmp_path, **fields)), 1e-5)


def test_ranks_that_do_not_divide_the_experts_are_refused(tmp_path: Path) -> None:
    make_architecture("mixtral", tmp_path, num_attention_heads=4, num_key_value_heads=4, num_local_experts=7)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide a layer's 7 experts"):
        make_thread_llm(tmp_path, 2, skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("name", MIXTURES)
def test_float32_is_transformers_and_bfloat16_as_near_as_theirs(name: str, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path)
    prompts = random_prompts(131, (5, 37))
    truth = hf_logits(model, prompts)
    half = hf_logits(model.bfloat16(), prompts)
    errors = {}
    for dtype in ("float32", "bfloat16"):
        ours, config = load_model(tmp_path, dtype, max_model_len=128)
        config = resolve_model_class(config.architectures).resolve_config(config)
        got = paged_logits(ours, config, prompts, 7, dtype=dtype)
        errors[dtype] = torch.cat([a - b for a, b in zip(got, truth, strict=True)]).abs()
    logits = torch.cat(truth)
    assert errors["float32"].max() < 1e-5 * max(1.0, float(logits.std()))
    # A token whose experts change by rounding is off by as much as it differs from another, in either implementation.
    own = errors["bfloat16"].amax(-1).median()
    theirs = torch.cat([(a.float() - b).abs() for a, b in zip(half, truth, strict=True)]).amax(-1).median()
    assert own <= 1.2 * theirs


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "minimax_m2"])
def test_tokens_that_all_go_to_the_same_experts(name: str, tmp_path: Path) -> None:
    """Not one number of the other experts is read."""
    model = make_architecture(name, tmp_path)
    biases = r".*(e_score_correction_bias|router\.bias)"
    with torch.no_grad():
        for own, tensor in model.state_dict().items():
            if re.fullmatch(biases, own):
                tensor[:3], tensor[3:] = 100, 0
            elif ".mlp.experts." in own:
                tensor[3:] = torch.nan
    model.save_pretrained(tmp_path)
    ours, config = load_model(tmp_path, max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    prompts = random_prompts(131, (1, 37))
    for got, want in zip(paged_logits(ours, config, prompts, 7), hf_logits(model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_experts_are_rounded_when_they_are_loaded(quantization: str, tmp_path: Path) -> None:
    model = make_architecture("qwen3_moe", tmp_path)
    prompts = random_prompts(131, (5, 37))
    errors = []
    for chosen in (None, quantization):
        ours, config = load_model(tmp_path, max_model_len=128, quantization=chosen)
        config = resolve_model_class(config.architectures).resolve_config(config)
        got = paged_logits(ours, config, prompts, 7)
        truth = hf_logits(model, prompts)
        errors.append(float(torch.cat([a - b for a, b in zip(got, truth, strict=True)]).abs().median()))
    # Four layers of 32 inputs, of which a few outliers take the whole scale.
    assert 100 * errors[0] < errors[1] < 0.5 * float(torch.cat(truth).std())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2_moe", "float32"),
        ("qwen2_moe", "bfloat16"),
        ("exaone_moe", "bfloat16"),
        ("deepseek_v3", "float32"),
        ("deepseek_v3", "bfloat16"),
        ("jetmoe", "float32"),
        ("longcat_flash", "bfloat16"),
    ],
)
def test_bits_do_not_follow_the_batch(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    make_architecture(name, tmp_path)
    llm = make_tiny_llm(tmp_path, dtype=dtype, skip_tokenizer_init=True, max_model_len=96, max_logprob_token_ids=-1)
    checks = list(InvarianceTest(llm.llm_engine).run())
    assert len(checks) > 3 and [check.name for check in checks if not check.passed] == []


def test_published_checkpoints_of_a_x_k1(tmp_path: Path) -> None:
    """They have no correction, and norms beside MLPs, too."""
    model = make_architecture("axk1", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "correction" not in name}
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    save_file(tensors | {"model.layers.0.post_mlp_layernorm.weight": torch.ones(32)}, path)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.zero_()
    ours, config = load_model(tmp_path, max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    prompts = random_prompts(131, (5, 37))
    for got, want in zip(paged_logits(ours, config, prompts, 7), hf_logits(model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_contexts_end_where_an_indexer_leaves_positions_out(tmp_path: Path) -> None:
    make_architecture("deepseek_v32", tmp_path, index_topk=32)
    load_model(tmp_path, max_model_len=32)
    with pytest.raises(ValueError, match="max_model_len must be at most index_topk, 32"):
        load_model(tmp_path, max_model_len=33)

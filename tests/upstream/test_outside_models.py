"""Models that were written for upstream, by its documentation of models from outside the tree, equal transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import check_adapters
from outside_models import plugin, stateful
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, reference

from vllm import LLM, ModelRegistry, SamplingParams
from vllm.utils import plugins

# Architecture -> transformers' model of the same checkpoint, and its options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BiasedForCausalLM": ("qwen2", {"use_sliding_window": False}),
    "WindowedForCausalLM": ("gemma2", {}),
    "MixtureForCausalLM": ("qwen3_moe", {"norm_topk_prob": True}),
}
PROMPTS = [list(range(3, 43)), [7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 90, 91]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    monkeypatch.setattr(plugins, "_has_loaded_general", True)
    plugin.register()


def make_model(folder: Path, architecture: str, **options: Any) -> Any:
    """transformers' model, saved in `folder` under another architecture's name."""
    kind, fields = KINDS.get(architecture, KINDS["BiasedForCausalLM"])
    model = make_tiny(kind, folder, **fields, **options)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    return model


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("outside") / request.param
    return folder, make_model(folder, request.param)


def make_llm(folder: Path, **fields: Any) -> LLM:
    usual = {"dtype": "float32", "max_model_len": 96, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    return LLM(str(folder), **{**usual, **fields})


@pytest.fixture
def as_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fresh interpreters find the plug-in, as if it were installed."""
    info = tmp_path / "outside_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\noutside = outside_models.plugin:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), str(Path(__file__).parent), *sys.path]))


def check(llm: LLM, model: Any, prompts: list[list[int]] = PROMPTS, num_tokens: int = 3) -> list[Any]:
    """Labels, prompt readings and greedy answers equal transformers'; returns the outputs."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, logprob_token_ids=[5, 6], prompt_logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        expected = reference(model, ids + list(answer.token_ids))
        for place, row in enumerate(output.prompt_logprobs[1:]):
            for token, reading in row.items():
                assert reading.logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
        for place, row in enumerate(answer.logprobs):
            own = expected[len(ids) - 1 + place]
            assert answer.token_ids[place] == own.argmax()
            for token in (5, 6):
                assert row[token].logprob == pytest.approx(own[token].item(), abs=1e-4)
    return outputs


def test_equals_transformers(checkpoint):
    """With chunks of prompts, several requests in a step, and prefixes that are cached."""
    folder, model = checkpoint
    llm = make_llm(folder, max_num_batched_tokens=32)
    check(llm, model)
    outputs = check(llm, model, [[*PROMPTS[0][:36], 50], PROMPTS[2]])
    assert outputs[0].num_cached_tokens >= 32


def test_a_layer_with_a_state(tmp_path):
    """Prompts in chunks, a prefix of which the state is kept, and single tokens."""
    model = make_model(tmp_path / "model", "StatefulForCausalLM")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for index, layer in enumerate(model.model.layers):
        weight = torch.randn(64, stateful.WIDTH, generator=torch.Generator().manual_seed(index)) * 0.3
        tensors[f"model.layers.{index}.convolution.weight"] = weight

        def behind(_: Any, __: Any, x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            padded = torch.cat([x.new_zeros(stateful.WIDTH - 1, x.shape[-1]), x[0]])
            return x + stateful.convolved(padded, weight)[None]

        layer.input_layernorm.register_forward_hook(behind)
    save_file(tensors, file)
    llm = make_llm(tmp_path / "model", max_num_batched_tokens=24)
    check(llm, model)
    outputs = check(llm, model, [[*PROMPTS[0][:36], 50], PROMPTS[2]])
    assert outputs[0].num_cached_tokens >= 16


def test_two_ranks(checkpoint, as_plugin):
    folder, model = checkpoint
    check(make_llm(folder, tensor_parallel_size=2), model)


def test_a_tied_head(tmp_path):
    model = make_model(tmp_path / "tied", "BiasedForCausalLM", tie_word_embeddings=True)
    check(make_llm(tmp_path / "tied"), model)


def test_new_weights_while_it_serves(checkpoint, tmp_path):
    folder, model = checkpoint
    llm = make_llm(folder)
    check(llm, model, PROMPTS[:1])
    other = make_model(tmp_path / "other", type_of(folder), seed=1)
    llm.collective_rpc("load_weights", args=(list(load_file(tmp_path / "other" / "model.safetensors").items()),))
    llm.reset_prefix_cache()
    check(llm, other)


def type_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def test_a_missing_weight_is_named(tmp_path):
    make_model(tmp_path / "model", "BiasedForCausalLM")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="lacks weights: model.layers.1.self_attn.o_proj.weight"):
        make_llm(tmp_path / "model")


def test_random_weights(checkpoint):
    folder, _ = checkpoint
    (output,) = make_llm(folder, load_format="dummy").generate(
        [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("architecture", ["BiasedForCausalLM", "MixtureForCausalLM"])
def test_adapters(architecture, tmp_path):
    """Adapters have the checkpoint's names, which the model joins and renames."""
    model = make_model(tmp_path / "model", architecture)
    llm = make_llm(tmp_path / "model", enable_lora=True, max_loras=2, max_lora_rank=8, max_logprobs=-1)
    check_adapters(llm, model, tmp_path)


def test_a_model_without_adapters_says_so(tmp_path):
    make_model(tmp_path / "model", "WindowedForCausalLM")
    with pytest.raises(ValueError, match="enable_lora: WindowedForCausalLM does not take adapters: derive it from"):
        make_llm(tmp_path / "model", enable_lora=True)


def test_a_quantised_checkpoint_is_refused(tmp_path):
    make_model(tmp_path / "model", "BiasedForCausalLM")
    with pytest.raises(ValueError, match="must have plain weights, but there is a quantization_config: de-quantise"):
        make_llm(tmp_path / "model", hf_overrides={"quantization_config": {"quant_method": "gptq", "bits": 4}})


def test_quantised_at_the_start(tmp_path):
    make_model(tmp_path / "model", "BiasedForCausalLM")
    (output,) = make_llm(tmp_path / "model", quantization="int8").generate(
        [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 2

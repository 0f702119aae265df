"""An adapter may hold more than products of linears: embeddings, the head, magnitudes, biases, weights, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from test_architectures import check_readings, expected_logprobs
from tiny_adapters import PREFIX, linears, make_adapter, merged
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, INNER = 32, 48
TOKENS = [7, 3, 90]
EMBEDDING = f"{PREFIX}model.embed_tokens"


def write_adapters(folder: Path, model: Any) -> list[Path]:
    """One of each kind."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    embedding = {
        f"{EMBEDDING}.lora_embedding_A": random(4, VOCAB_SIZE),
        f"{EMBEDDING}.lora_embedding_B": random(HIDDEN, 4),
        # peft stores these whole, too.
        f"{EMBEDDING}.base_layer.weight": model.model.embed_tokens.weight.detach().clone(),
        f"{PREFIX}lm_head.base_layer.weight": model.lm_head.weight.detach().clone(),
    }
    whole = {
        f"{PREFIX}lm_head.weight": random(VOCAB_SIZE, HIDDEN),
        f"{EMBEDDING}.weight": random(VOCAB_SIZE, HIDDEN),
        f"{PREFIX}model.layers.1.mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{PREFIX}model.layers.0.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{PREFIX}model.layers.1.mlp.down_proj.bias": random(HIDDEN),
    }
    sizes = {name: outputs for name, (outputs, _) in linears(model).items()}
    magnitudes = {f"{PREFIX}{name}.lora_magnitude_vector": random(size).abs() + 0.5 for name, size in sizes.items()}
    magnitudes[f"{EMBEDDING}.lora_magnitude_vector"] = random(HIDDEN).abs() + 0.5
    magnitudes |= {name: tensor for name, tensor in embedding.items() if "lora_embedding" in name}
    # peft has those of an adapted linear under another name.
    biases = {f"{PREFIX}{name}.base_layer.bias": random(size) for name, size in sizes.items() if "q_proj" in name}
    biases |= {f"{PREFIX}{name}.bias": random(size) for name, size in sizes.items() if "k_proj" in name}
    norms = {f"{PREFIX}{name}": random(HIDDEN) + 1 for name, _ in model.named_parameters() if "norm.weight" in name}
    tokens = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": random(3, HIDDEN)}
    return [
        make_adapter(folder / "embedding", model, targets=("lm_head", "q_proj"), seed=1, tensors=embedding),
        make_adapter(folder / "whole", model, targets=("v_proj",), seed=2, tensors=whole),
        make_adapter(folder / "dora", model, seed=3, tensors=magnitudes, use_dora=True),
        make_adapter(folder / "biases", model, seed=4, targets=("q_proj",), tensors=biases, bias="all"),
        make_adapter(folder / "norms", model, seed=5, tensors=norms, modules_to_save=["norm", "input_layernorm"]),
        make_adapter(folder / "tokens", model, seed=6, tensors=tokens, trainable_token_indices=TOKENS),
    ]


@pytest.mark.parametrize("is_tied", (False, True))
def test_readings_equal_those_of_changed_models(is_tied: bool, tmp_path: Path) -> None:
    model = make_architecture("llama", tmp_path / "model", tie_word_embeddings=is_tied)
    folders = write_adapters(tmp_path, model)
    models = [model, *(merged(model, folder) for folder in folders)]
    fields: Any = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    llm = LLM(str(tmp_path / "model"), **fields, max_model_len=128, enable_lora=True, max_loras=6)
    requests = [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 30, 9, 17, 5, 22, 1, 8, 12, 4)
    ]
    for prompt in prompts:
        prompt += TOKENS
    own = [index % len(models) for index in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = [requests[number - 1] if number else None for number in own]
    for prompt, number, output in zip(prompts, own, llm.generate(inputs, params, lora_request=asked), strict=True):
        want = expected_logprobs(models[number], prompt + list(output.outputs[0].token_ids))
        check_readings(want, prompt, output)


def test_norms_of_layers_with_states(tmp_path: Path) -> None:
    """Norms of heads, of all heads together and with a gate, and LayerNorms with a bias; eager steps, as none is
    recorded."""
    for name in ("olmo2", "qwen3", "gpt2", "mamba2"):
        model = make_architecture(name, tmp_path / name)
        generator = torch.Generator().manual_seed(2)
        norms = {
            f"{PREFIX}{own}": torch.randn(tensor.shape, generator=generator) * 0.25 + 0.7
            for own, tensor in model.named_parameters()
            if "norm" in own or ".ln_" in own
        }
        folder = make_adapter(tmp_path / f"{name}-a", model, targets=(), tensors=norms)
        check_one(tmp_path / name, model, merged(model, folder), folder)


def check_one(path: Path, model: Any, changed: Any, folder: Path, lengths: tuple[int, ...] = (3, 30, 9, 17)) -> None:
    """Every second request runs with the adapter."""
    fields: Any = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    if max(lengths) > 100:
        fields["max_num_batched_tokens"] = 2 * max(lengths)
    llm = LLM(str(path), **fields, max_model_len=max(lengths) + 8, enable_lora=True)
    request = LoRARequest("a", 1, str(folder))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = [request if index % 2 else None for index in range(len(prompts))]
    for prompt, own, output in zip(prompts, asked, llm.generate(inputs, params, lora_request=asked), strict=True):
        want = expected_logprobs(changed if own else model, prompt + list(output.outputs[0].token_ids))
        check_readings(want, prompt, output)


def test_latent_attention(tmp_path: Path) -> None:
    """Whose kv_b_proj is taken apart, and is whole for long prompts."""
    model = make_architecture("deepseek_v3", tmp_path / "model", max_position_embeddings=300)
    folder = make_adapter(tmp_path / "a", model, targets=("kv_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    check_one(tmp_path / "model", model, merged(model, folder), folder, (3, 30, 270, 260))
    damaged = {f"{PREFIX}model.layers.0.self_attn.kv_b_proj.weight": torch.ones(4 * 22, 20)}
    folder = make_adapter(tmp_path / "b", model, targets=("o_proj",), tensors=damaged)
    llm = LLM(str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True, max_model_len=64, enable_lora=True)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: .*kv_b_proj.*cannot be replaced"):
        llm.llm_engine.engine_core.executor.worker.add_lora(LoRARequest("b", 1, str(folder)))


def test_values_that_are_narrower_than_keys(tmp_path: Path) -> None:
    """Their projections are filled up with zeros here."""
    model = make_architecture("mimo_v2_flash", tmp_path / "model")
    folder = make_adapter(tmp_path / "a", model, targets=("v_proj", "o_proj"))
    check_one(tmp_path / "model", model, merged(model, folder), folder)


def test_layers_that_share_a_block_have_no_adapters_of_it(tmp_path: Path) -> None:
    model = make_architecture("zamba", tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True, max_model_len=64, enable_lora=True)
    worker = llm.llm_engine.engine_core.executor.worker
    folder = make_adapter(tmp_path / "a", model, targets=("q_proj",))
    with pytest.raises(ValueError, match=r"shared_transf\.self_attn\.q_proj: .*no such layer"):
        worker.add_lora(LoRARequest("a", 1, str(folder)))
    norm = {f"{PREFIX}model.layers.1.shared_transf.input_layernorm.weight": torch.ones(2 * HIDDEN)}
    folder = make_adapter(tmp_path / "b", model, targets=(), tensors=norm)
    with pytest.raises(ValueError, match=r"input_layernorm\.weight: .*no such tensor"):
        worker.add_lora(LoRARequest("b", 2, str(folder)))


def expert_tensors(model: Any, rank: int, of_each: bool) -> dict[str, Tensor]:
    """Adapters of the stacks in transformers' modules, as peft's target_parameters has them; or `of_each` expert's
    matrices, as Mixtral's checkpoints name them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, stack in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            continue
        is_turned = getattr(model.get_submodule(module), "is_transposed", False)
        count, outputs, inputs = (stack.transpose(1, 2) if is_turned else stack).shape
        a = torch.randn(count * rank, inputs, generator=generator) * 0.2
        b = torch.randn(outputs, rank * count, generator=generator) * 0.2
        if not of_each:
            own = f"{PREFIX}{module}{'.base_layer' if kind == 'gate_up_proj' else ''}"
            tensors |= {f"{own}.lora_A.weight": a, f"{own}.lora_B.weight": b}
            continue
        first = module.replace(".mlp.", ".block_sparse_moe.")
        for expert in range(count):
            own_a, own_b = a.unflatten(0, (count, -1))[expert], b.unflatten(1, (-1, count))[..., expert]
            parts = zip(("w1", "w3"), own_b.chunk(2), strict=True) if kind == "gate_up_proj" else (("w2", own_b),)
            for part, rows in parts:
                tensors[f"{PREFIX}{first}.{expert}.{part}.lora_A.weight"] = own_a.clone()
                tensors[f"{PREFIX}{first}.{expert}.{part}.lora_B.weight"] = rows.clone()
    return tensors


@pytest.mark.parametrize(("name", "of_each"), (("qwen3_moe", False), ("gpt_oss", False), ("mixtral", True)))
def test_experts_may_be_adapted(name: str, of_each: bool, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path / "model")
    stacks = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    folder = make_adapter(
        tmp_path / "a",
        model,
        3,
        targets=("q_proj", "v_proj"),
        tensors=expert_tensors(model, 3, of_each=False),
        **stacks,
    )
    changed = merged(model, folder)
    if of_each:
        tensors = expert_tensors(model, 3, of_each=True)
        folder = make_adapter(tmp_path / "b", model, 3, targets=("q_proj", "v_proj"), tensors=tensors)
    check_one(tmp_path / "model", model, changed, folder)

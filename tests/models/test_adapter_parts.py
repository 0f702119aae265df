"""What an adapter may hold beside products of linears: embeddings, the head, magnitudes, biases, weights, experts."""

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
EMBEDDING = f"{PREFIX}model.embed_tokens"


def write_adapters(folder: Path, model: Any) -> list[Path]:
    """One of each kind."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    embedding = {
        f"{EMBEDDING}.lora_embedding_A": random(4, VOCAB_SIZE),
        f"{EMBEDDING}.lora_embedding_B": random(HIDDEN, 4),
    }
    whole = {
        f"{PREFIX}lm_head.weight": random(VOCAB_SIZE, HIDDEN),
        f"{EMBEDDING}.weight": random(VOCAB_SIZE, HIDDEN),
        f"{PREFIX}model.layers.1.mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{PREFIX}model.layers.1.mlp.down_proj.bias": random(HIDDEN),
    }
    sizes = {name: outputs for name, (outputs, _) in linears(model).items()}
    magnitudes = {f"{PREFIX}{name}.lora_magnitude_vector": random(size).abs() + 0.5 for name, size in sizes.items()}
    biases = {f"{PREFIX}{name}.bias": random(size) for name, size in sizes.items() if "self_attn" in name}
    return [
        make_adapter(folder / "embedding", model, targets=("lm_head", "q_proj"), seed=1, tensors=embedding),
        make_adapter(folder / "whole", model, targets=("v_proj",), seed=2, tensors=whole),
        make_adapter(folder / "dora", model, seed=3, tensors=magnitudes, use_dora=True),
        make_adapter(folder / "biases", model, seed=4, tensors=biases, bias="all"),
    ]


@pytest.mark.parametrize("is_tied", (False, True))
def test_readings_equal_those_of_changed_models(is_tied: bool, tmp_path: Path) -> None:
    model = make_architecture("llama", tmp_path / "model", tie_word_embeddings=is_tied)
    folders = write_adapters(tmp_path, model)
    models = [model, *(merged(model, folder) for folder in folders)]
    fields: Any = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    llm = LLM(str(tmp_path / "model"), **fields, max_model_len=128, enable_lora=True, max_loras=4)
    requests = [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 30, 9, 17, 5, 22, 1, 8)]
    own = [index % len(models) for index in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = [requests[number - 1] if number else None for number in own]
    for prompt, number, output in zip(prompts, own, llm.generate(inputs, params, lora_request=asked), strict=True):
        want = expected_logprobs(models[number], prompt + list(output.outputs[0].token_ids))
        check_readings(want, prompt, output)


def test_a_norm_cannot_be_replaced(tmp_path: Path) -> None:
    model = make_architecture("llama", tmp_path / "model")
    folder = make_adapter(tmp_path / "a", model, tensors={f"{PREFIX}model.norm.weight": torch.ones(HIDDEN)})
    llm = LLM(str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True, max_model_len=64, enable_lora=True)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: model\.norm\.weight: .*replace"):
        llm.llm_engine.engine_core.executor.worker.add_lora(LoRARequest("a", 1, str(folder)))


def expert_tensors(model: Any, rank: int, of_each: bool) -> dict[str, Tensor]:
    """Of the stacks in transformers' modules, as peft's target_parameters has them; or `of_each` expert's matrices, as
    Mixtral's checkpoints name them."""
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
    fields: Any = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    llm = LLM(str(tmp_path / "model"), **fields, max_model_len=128, enable_lora=True)
    request = LoRARequest("a", 1, str(folder))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 30, 9, 17)]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = [None, request, None, request]
    for prompt, own, output in zip(prompts, asked, llm.generate(inputs, params, lora_request=asked), strict=True):
        want = expected_logprobs(changed if own else model, prompt + list(output.outputs[0].token_ids))
        check_readings(want, prompt, output)

"""What an adapter may hold beside products of linears: embeddings, the head, magnitudes (DoRA), biases, whole weights."""

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

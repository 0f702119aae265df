"""LoRA adapters of pooling models, decoders and encoders, against transformers' model with the adapter merged in."""

from __future__ import annotations

import pytest
import torch
from test_pooling_decoders import config_of, save
from tiny_adapters import make_adapter, merged

from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
PROMPTS = [[5, 7, 9], list(range(20, 61)), [3], [*range(20, 55), 7, 9]]


def adapters_of(folder, model, count):
    """Requests of random adapters, and the merged model of each; None stands for no adapter."""
    models = {None: model}
    requests = []
    for number in range(1, count + 1):
        path = make_adapter(folder / f"a{number}", model, rank=3, seed=number)
        requests.append(LoRARequest(f"a{number}", number, str(path)))
        models[f"a{number}"] = merged(model, path)
    return requests, models


def start(folder, **fields):
    options = {"skip_tokenizer_init": True, "dtype": "float32", "gpu_memory_utilization": 0.3, "enable_lora": True}
    return LLM(str(folder), **{**options, **fields})


def ids_of(prompts):
    return [{"prompt_token_ids": each} for each in prompts]


@torch.no_grad()
def test_embeddings_of_a_decoder(tmp_path):
    model = save(tmp_path / "model", config_of("Qwen3Config"))
    requests, models = adapters_of(tmp_path, model, 3)
    llm = start(tmp_path / "model", runner="pooling", max_loras=2, max_num_batched_tokens=24, max_model_len=100)
    each = [requests[0], None, requests[1], requests[2]]
    for _ in range(2):
        for prompt, own, output in zip(PROMPTS, each, llm.embed(ids_of(PROMPTS), lora_request=each), strict=True):
            hidden = models[own and own.lora_name](torch.tensor([prompt])).last_hidden_state[0, -1]
            torch.testing.assert_close(
                torch.tensor(output.outputs.embedding), torch.nn.functional.normalize(hidden, dim=0), **TOLERANCE
            )
        # The same prompts with other adapters: no prefix is shared.
        each = [requests[1], requests[2], None, requests[0]]
    with pytest.raises(VLLMValidationError, match="lora_request has 4 entries for 1 prompts"):
        llm.embed(ids_of(PROMPTS[:1]), lora_request=each)

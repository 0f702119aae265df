"""Engines whose requests run with adapters and without one, against transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from quantized_models import PARAMS, PROMPTS, assert_reads
from tiny_adapters import PREFIX, linears, make_adapter, merged

from vllm import LLM
from vllm.lora.request import LoRARequest


def check_adapters(llm: LLM, model: Any, folder: Path) -> None:
    """Requests with adapters, one with magnitudes, and without one in the same steps."""
    generator = torch.Generator().manual_seed(7)
    magnitudes = {
        f"{PREFIX}{name}.lora_magnitude_vector": torch.rand(outputs, generator=generator) + 0.5
        for name, (outputs, _) in linears(model).items()
    }
    paths = [
        make_adapter(folder / "plain", model, rank=3, seed=1),
        make_adapter(folder / "dora", model, rank=4, seed=2, tensors=magnitudes, use_dora=True),
    ]
    requests = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    models = [model, *(merged(model, path) for path in paths)]
    asked = [None, *requests, *requests]
    prompts = [*PROMPTS, *PROMPTS[:2]]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, PARAMS, use_tqdm=False, lora_request=asked)
    for prompt, own, output in zip(prompts, asked, outputs, strict=True):
        assert_reads([output], models[0 if own is None else own.lora_int_id], [prompt])

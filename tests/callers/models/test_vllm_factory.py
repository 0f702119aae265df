"""vllm-factory's EmbeddingGemma: its model over transformers' backbone, with a pooler of its own, unmodified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny

from vllm import LLM

pytest.importorskip("vllm_factory")

PROMPTS = [[3, 4, 5, 6], [7] * 9]


def dense_layers(model: Any) -> list[torch.Tensor]:
    pooler = model.pooler._inner
    return [pooler.dense1.weight.clone(), pooler.dense2.weight.clone()]


@torch.no_grad()
def test_embeddings_are_those_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its other plug-ins' models ask for further packages.
    monkeypatch.setenv("VLLM_PLUGINS", "embeddinggemma")
    model = make_tiny("gemma3_text", tmp_path).model
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["EmbeddingGemmaModel"]}))
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, skip_tokenizer_init=True)
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    # It reads them from the hub, where they are not: they are random.
    first, second = llm.apply_model(dense_layers)[0]
    for ids, output in zip(PROMPTS, outputs, strict=True):
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean @ first.T @ second.T, dim=-1)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=0)

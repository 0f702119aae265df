"""Models from outside the tree that are pooled, against transformers' hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_models import embedders
from tiny_models import make_tiny

from vllm import LLM, ModelRegistry, PoolingParams

PROMPTS = [[5, 9, 30, 31], [7] * 11, list(range(40, 61))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedders") / "model"
    return folder, make_tiny("qwen2", folder, use_sliding_window=False)


@pytest.fixture
def make_llm(checkpoint, monkeypatch):
    def make(name: str, **fields: Any) -> LLM:
        folder, _ = checkpoint
        monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
        ModelRegistry.register_model(name, getattr(embedders, name))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}))
        return LLM(str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, **fields)

    return make


@torch.no_grad()
def states(model: Any, ids: list[int], both_ways: bool = False) -> torch.Tensor:
    mask = torch.zeros(1, 1, len(ids), len(ids)) if both_ways else None
    return model.model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]


def embed(llm: LLM, **options: Any) -> list[torch.Tensor]:
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False, **options)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("name", ["MeanEmbedder", "TwoWayEmbedder"])
def test_upstreams_pooler(name, checkpoint, make_llm):
    llm = make_llm(name)
    for ids, got in zip(PROMPTS, embed(llm), strict=True):
        mean = states(checkpoint[1], ids, both_ways=name == "TwoWayEmbedder").mean(0)
        torch.testing.assert_close(got, mean / mean.norm(), atol=1e-4, rtol=0)
    plain = embed(llm, pooling_params=PoolingParams(task="embed", use_activation=False))
    assert plain[0].norm() > 1.5


def test_embeddings_of_tokens(checkpoint, make_llm):
    outputs = make_llm("MeanEmbedder").encode(
        [{"prompt_token_ids": PROMPTS[0]}], pooling_task="token_embed", use_tqdm=False
    )
    expected = torch.nn.functional.normalize(states(checkpoint[1], PROMPTS[0]), dim=-1)
    torch.testing.assert_close(torch.as_tensor(outputs[0].outputs.data), expected, atol=1e-4, rtol=0)


def test_the_configuration_wins_over_the_models_default(checkpoint, make_llm):
    llm = make_llm("MeanEmbedder", pooler_config={"pooling_type": "LAST"})
    for ids, got in zip(PROMPTS, embed(llm), strict=True):
        last = states(checkpoint[1], ids)[-1]
        torch.testing.assert_close(got, last / last.norm(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["OwnEmbedder", "BareEmbedder"])
def test_a_pooler_of_its_own(name, checkpoint, make_llm):
    llm = make_llm(name)
    for ids, got in zip(PROMPTS, embed(llm), strict=True):
        expected = torch.cat([states(checkpoint[1], ids).max(0).values, torch.tensor([float(sum(ids))])])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_task_that_the_pooler_lacks_is_refused(make_llm):
    with pytest.raises(ValueError, match="the model's pooler does embed, and not token_embed: choose by pooler_config"):
        make_llm("OwnEmbedder", pooler_config={"task": "token_embed"})

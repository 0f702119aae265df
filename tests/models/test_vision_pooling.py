"""Rerankers and retrievers of pictures: their scores and vectors equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, RETRIEVERS, Reference, draw, make_retriever, make_vision_model

from vllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
PICTURES = [draw(40, 30, 1), draw(64, 24, 2), draw(20, 50, 3)]


def given(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


@torch.no_grad()
def test_rerankers_of_words_equal_transformers(tmp_path: Path) -> None:
    model, tokenizer = make_vision_model("qwen3_vl", tmp_path)
    reference, place = Reference(model, tokenizer, "qwen3_vl"), FAMILIES["qwen3_vl"].placeholder
    # Qwen3-VL-Reranker's published settings, with words of one byte.
    overrides = {"architectures": ["Qwen3VLForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    overrides["is_original_qwen3_reranker"] = True
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=400, runner="pooling", hf_overrides=overrides)
    prompts = [
        given("a cat? a text"),
        given(f"a cat? {place}", PICTURES[0]),
        given(f"{place} is {place}?", *PICTURES[1:]),
    ]
    no, yes = (tokenizer.encode(word)[0] for word in "ny")
    for prompt, output in zip(prompts, llm.classify(prompts, use_tqdm=False), strict=True):
        ids, values = reference.processed(prompt["prompt"], prompt["multi_modal_data"]["image"])
        row = reference.logprobs(ids, values)[-1]
        want = 1 / (1 + np.exp(row[no] - row[yes]))
        assert output.outputs.probs == pytest.approx([want], abs=TOLERANCE)


def score(query: torch.Tensor, document: torch.Tensor) -> float:
    """MaxSim."""
    return float((query @ document.T).max(1).values.sum())


@torch.no_grad()
@pytest.mark.parametrize("kind", RETRIEVERS)
def test_retrievers_equal_transformers(kind: str, tmp_path: Path) -> None:
    model, tokenizer, processor = make_retriever(kind, tmp_path)
    place = FAMILIES[RETRIEVERS[kind]].placeholder
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=400, runner="pooling", max_num_batched_tokens=32)
    prompts = [given("which page?"), *(given(f"{place}about it", picture) for picture in PICTURES)]
    found, wanted = [], []
    for prompt, output in zip(prompts, llm.encode(prompts, pooling_task="token_embed", use_tqdm=False), strict=True):
        pictures = prompt["multi_modal_data"]["image"]
        data = {"input_ids": torch.tensor([tokenizer.encode(prompt["prompt"])])}
        if pictures:
            data = dict(processor(text=[prompt["prompt"]], images=pictures, return_tensors="pt"))
        ids = data["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids
        values = {name: data[name] for name in ("input_ids", "pixel_values", "image_grid_thw") if name in data}
        if kind == "ColQwen2" and pictures:
            # Its own processor pads pictures to one length.
            values["pixel_values"] = values["pixel_values"][None]
        want = model(**values).embeddings[0]
        own = torch.as_tensor(output.outputs.data)
        np.testing.assert_allclose(own, want, atol=TOLERANCE)
        found.append(own)
        wanted.append(want)
    for own, want in zip(found[1:], wanted[1:], strict=True):
        assert score(found[0], own) == pytest.approx(score(wanted[0], want), abs=TOLERANCE * len(want))

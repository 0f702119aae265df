"""CLIP and SigLIP embed texts and pictures: their vectors equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import fill_weights
from pictures import data_url
from safetensors.torch import load_file
from tiny_pairs import KINDS, make_pair, reference
from tiny_vision import draw

from vllm import LLM, PoolingParams
from vllm.config.checkpoint.sentence_transformers import named_prompts
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
TEXTS = ["a photo of a cat", "red", "two red dog of a cat c b a", "a photo of a dog", ""]
PICTURES = [draw(40, 30, 1), draw(64, 24, 2, "RGBA"), draw(20, 50, 3, "L")]


def prompts_of(items: list[Any]) -> list[Any]:
    return [item if isinstance(item, str) else {"prompt": "", "multi_modal_data": {"image": item}} for item in items]


def embed(llm: LLM, items: list[Any], **options: Any) -> np.ndarray:
    outputs = llm.embed(prompts_of(items), use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs])


RAW = PoolingParams(use_activation=False)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_equal_transformers(kind: str, tmp_path: Path) -> None:
    made = make_pair(kind, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    # More pictures than a step takes, among texts of several lengths.
    items = [TEXTS[0], PICTURES[0], *TEXTS[1:], *PICTURES[1:], *(draw(30, 30 + i, i) for i in range(9))]
    want = np.array([reference(*made, item) for item in items])
    # They differ from one another far more than the tolerance.
    assert np.abs(want[:, None] - want[None]).max(-1)[~np.eye(len(want), dtype=bool)].min() > 100 * TOLERANCE
    np.testing.assert_allclose(embed(llm, items, pooling_params=RAW), want, atol=TOLERANCE)
    normalised = want / np.linalg.norm(want, axis=1, keepdims=True)
    together = embed(llm, items)
    np.testing.assert_allclose(together, normalised, atol=TOLERANCE)
    # The same alone, to the bit.
    fresh = LLM(str(tmp_path), dtype="float32", runner="pooling")
    for item, vector in zip(items, together, strict=True):
        assert embed(fresh, [item])[0].tolist() == vector.tolist()


@pytest.mark.parametrize("ends", [[], ["Normalize"], ["Dense"]])
def test_sentence_transformers_folders(ends: list[str], tmp_path: Path) -> None:
    """Their authors' model is in the folder of its module, and is normalised only where a module does so."""
    folder = tmp_path / "published"
    made = make_pair("clip", folder / "0_CLIPModel")
    kinds = ["CLIPModel", *ends]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if ends == ["Dense"]:
        (folder / "1_Dense").mkdir()
        (folder / "1_Dense/config.json").write_text(json.dumps({"in_features": 20, "out_features": 20}))
        with pytest.raises(ValueError, match=r"modules.json: only Normalize is supported after a CLIPModel"):
            LLM(str(folder), runner="pooling")
        return
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "red "}}))
    llm = LLM(str(folder), dtype="float32", runner="pooling")
    items = [TEXTS[0], PICTURES[0]]
    want = np.array([reference(*made, item) for item in items])
    want /= np.linalg.norm(want, axis=1, keepdims=True) if ends else 1
    np.testing.assert_allclose(embed(llm, items), want, atol=TOLERANCE)
    assert named_prompts(Path(llm.llm_engine.model_config.path)) == {"query": "red "}


def test_new_weights_count_for_texts_and_pictures(tmp_path: Path) -> None:
    make_pair("clip", tmp_path / "one")
    model, *others = make_pair("clip", tmp_path / "two")
    fill_weights(model, 7)
    model.save_pretrained(tmp_path / "two")
    llm = LLM(str(tmp_path / "one"), dtype="float32", runner="pooling")
    items = [TEXTS[0], PICTURES[0]]
    want = np.array([reference(model, *others, item) for item in items])
    assert np.abs(embed(llm, items, pooling_params=RAW) - want).max() > 100 * TOLERANCE
    weights = load_file(tmp_path / "two" / "model.safetensors")
    llm.apply_model(lambda own: own.load_weights(list(weights.items())))
    np.testing.assert_allclose(embed(llm, items, pooling_params=RAW), want, atol=TOLERANCE)
    with pytest.raises(ValueError, match="no weight nothing"):
        llm.apply_model(lambda own: own.load_weights([("nothing", torch.zeros(1))]))


def test_what_is_refused(tmp_path: Path) -> None:
    make_pair("clip", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    picture = {"image": PICTURES[0]}
    both = "a text or of one picture, not of both"
    for prompt in (
        {"prompt": "a cat", "multi_modal_data": picture},
        {"prompt_token_ids": [2, 3], "multi_modal_data": picture},
        {"prompt": "", "multi_modal_data": {"image": PICTURES[:2]}},
    ):
        with pytest.raises(VLLMValidationError, match=both):
            llm.embed(prompt, use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="16 tokens"):
        llm.embed("a " * 20, use_tqdm=False)
    with pytest.raises(VLLMValidationError):
        llm.encode("a cat", pooling_task="token_embed", use_tqdm=False)
    with pytest.raises(ValueError, match="seq_pooling_type=MEAN is not supported for a model that pools itself"):
        LLM(str(tmp_path), runner="pooling", pooler_config={"seq_pooling_type": "MEAN"})
    with pytest.raises(ValueError, match="enable_lora=True"):
        LLM(str(tmp_path), runner="pooling", enable_lora=True)


def test_texts_that_are_cut(tmp_path: Path) -> None:
    model, tokenizer, _ = make_pair("clip", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    text = "a cat b " * 9
    ids = tokenizer([text], truncation=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = model.get_text_features(ids).pooler_output.numpy()
    own = PoolingParams(use_activation=False, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(embed(llm, [text], pooling_params=own), want, atol=TOLERANCE)


def test_scores_of_texts_and_pictures_are_cosines(tmp_path: Path) -> None:
    made = make_pair("siglip", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    items = [TEXTS[0], *PICTURES]
    text, *pictures = (vector / np.linalg.norm(vector) for vector in (reference(*made, item) for item in items))
    documents: Any = [{"content": [{"type": "image_url", "image_url": {"url": data_url(each)}}]} for each in PICTURES]
    outputs = llm.score(TEXTS[0], documents, use_tqdm=False)
    found = [output.outputs.score for output in outputs]
    assert found == pytest.approx([float(text @ each) for each in pictures], abs=TOLERANCE)
    assert max(found) - min(found) > 100 * TOLERANCE


def test_conversations_have_the_ends_of_texts(tmp_path: Path) -> None:
    """As templates write them for other models, and `vllm embed --image-field` reads rows so."""
    made = make_pair("clip", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    parts: list[Any] = [TEXTS[0], [{"type": "image_pil", "image_pil": PICTURES[0]}]]
    chats: Any = [[{"role": "user", "content": each}] for each in parts]
    prompts = llm.preprocess_chat(chats, add_generation_prompt=False)
    outputs = llm.embed(prompts, pooling_params=RAW, use_tqdm=False)
    for output, item in zip(outputs, (TEXTS[0], PICTURES[0]), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, reference(*made, item), atol=TOLERANCE)

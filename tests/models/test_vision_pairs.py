"""CLIP and SigLIP embed texts and pictures: their vectors equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from architectures import fill_weights
from PIL import Image
from safetensors.torch import load_file
from tiny_vision import draw
from tokenizers import models, pre_tokenizers, processors

from vllm import LLM, PoolingParams
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
WORDS = "a b c cat dog of photo red two".split()
TEXTS = ["a photo of a cat", "red", "two red dog of a cat c b a", "a photo of a dog", ""]
PICTURES = [draw(40, 30, 1), draw(64, 24, 2, "RGBA"), draw(20, 50, 3, "L")]
_TOWER = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3}
_EDGE = {"height": 28, "width": 28}
_TEXT = _TOWER | {"max_position_embeddings": 16, "projection_size": 20}
_KINDS: dict[str, dict[str, Any]] = {
    # The ids of the ends of texts of the first published files, which are wrong there, and of later ones.
    "clip_2": {"type": "clip", "text": {"eos_token_id": 2, "bos_token_id": 0}},
    "clip": {"type": "clip", "text": {}},
    "siglip": {"type": "siglip", "text": _TEXT},
    "siglip2": {"type": "siglip2", "text": _TEXT},
    "siglip2_masked": {"type": "siglip2", "text": _TEXT},
}


def make_pair(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """A random model in float32 with its tokenizer and picture processor, saved to `folder`."""
    family, is_clip = _KINDS[kind]["type"], _KINDS[kind]["type"] == "clip"
    names = ["<pad>", "<unk>", *WORDS, "<begin>", "<end>"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(each, names.index(each)) for each in ("<begin>", "<end>")]
    backend.post_processor = processors.TemplateProcessing("<begin> $A <end>" if is_clip else "$A <end>", None, ends)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<begin>", eos_token="<end>", unk_token="<unk>",
        pad_token="<end>" if is_clip else "<pad>", padding_side="right", model_max_length=16,
        model_input_names=["input_ids"] + (["attention_mask"] if is_clip or kind == "siglip2_masked" else []),
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    text = _TOWER | {"vocab_size": len(names), "max_position_embeddings": 16, "eos_token_id": len(names) - 1}
    vision = _TOWER | {"image_size": 28, "patch_size": 7}
    if family == "siglip2":
        vision = _TOWER | {"patch_size": 7, "num_patches": 16}
    if is_clip:
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=_EDGE)
    elif family == "siglip":
        images = transformers.SiglipImageProcessorPil(size=_EDGE)
    else:
        images = transformers.Siglip2ImageProcessorPil(patch_size=7, max_num_patches=20)
        vision["hidden_size"] = text["hidden_size"]
    more = {"projection_dim": 20} if is_clip else {}
    config = transformers.CONFIG_MAPPING[family](
        text_config=text | _KINDS[kind]["text"] | ({} if is_clip else {"projection_size": 24}),
        vision_config=vision,
        **more,
    )
    model = transformers.MODEL_MAPPING[type(config)](config).float().eval()
    model.set_attn_implementation("eager")
    fill_weights(model, 0)
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    return model, tokenizer, images


@torch.no_grad()
def reference(model: Any, tokenizer: Any, images: Any, item: str | Image.Image) -> np.ndarray:
    """transformers' features of a text or a picture."""
    if isinstance(item, str):
        way = True if model.config.model_type == "clip" else "max_length"
        found = model.get_text_features(**without_types(tokenizer([item], padding=way, return_tensors="pt")))
    else:
        found = model.get_image_features(**images(images=[item.convert("RGB")], return_tensors="pt"))
    vector: np.ndarray = found.pooler_output[0].numpy()
    return vector


def without_types(data: Any) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "token_type_ids"}


def prompts_of(items: list[Any]) -> list[Any]:
    return [item if isinstance(item, str) else {"prompt": "", "multi_modal_data": {"image": item}} for item in items]


def embed(llm: LLM, items: list[Any], **options: Any) -> np.ndarray:
    outputs = llm.embed(prompts_of(items), use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs])


RAW = PoolingParams(use_activation=False)


@pytest.mark.parametrize("kind", _KINDS)
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

"""Tiny models with a tower of texts and one of pictures (CLIP, SigLIP), and transformers' vectors of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from architectures import fill_weights
from PIL import Image
from tokenizers import models, pre_tokenizers, processors

WORDS = "a b c cat dog of photo red two".split()
_TOWER = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3}
_EDGE = {"height": 28, "width": 28}
_TEXT = _TOWER | {"max_position_embeddings": 16, "projection_size": 20}
KINDS: dict[str, dict[str, Any]] = {
    # The ids of the ends of texts of the first published files, which are wrong there, and of later ones.
    "clip_2": {"type": "clip", "text": {"eos_token_id": 2, "bos_token_id": 0}},
    "clip": {"type": "clip", "text": {}},
    "siglip": {"type": "siglip", "text": _TEXT},
    "siglip2": {"type": "siglip2", "text": _TEXT},
    "siglip2_masked": {"type": "siglip2", "text": _TEXT},
}


def make_pair(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """A random model in float32 with its tokenizer and picture processor, saved to `folder`."""
    family, is_clip = KINDS[kind]["type"], KINDS[kind]["type"] == "clip"
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
        text_config=text | KINDS[kind]["text"] | ({} if is_clip else {"projection_size": 24}),
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

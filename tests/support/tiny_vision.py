"""Tiny models that read pictures, with random weights, and transformers' readings of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from architectures import fill_weights
from PIL import Image, ImageDraw
from tokenizers import decoders, models, pre_tokenizers

EDGE = 28  # pixels of a picture that the fixed-size towers take
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 3, "image_size": EDGE, "patch_size": 7, "projection_dim": 16,
}  # fmt: skip
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model"}


@dataclass(frozen=True)
class VisionFamily:
    """How a tiny model of a family is made.

    Attributes:
        model_type: transformers'.
        text: the text decoder's options, beside the usual ones.
        vision: the tower's.
        whole: the model's, beside those; values may be names of tokens, "id:<token>".
        tokens: the special tokens, in the order of their ids.
        placeholder: what stands for a picture in a prompt.
        image_processor: class and options.
        processor: the processor's options, and its class under "processor_class".
        tokenizer: further options of the tokenizer, such as names of special tokens.
        prepare: changes the model before it is saved.
    """

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    tokens: Sequence[str]
    placeholder: str
    image_processor: tuple[str, dict[str, Any]]
    processor: dict[str, Any]
    whole: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None


_CLIP_PROCESSOR = (
    "CLIPImageProcessor",
    {"size": {"shortest_edge": EDGE}, "crop_size": {"height": EDGE, "width": EDGE}, "do_convert_rgb": True},
)
_QWEN = {
    "tokens": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    "whole": {
        "image_token_id": "id:<|image_pad|>", "video_token_id": "id:<|video_pad|>",
        "vision_start_token_id": "id:<|vision_start|>", "vision_end_token_id": "id:<|vision_end|>",
    },
}  # fmt: skip
_QWEN_IMAGES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 3200}}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        "llava", {"model_type": "llama"}, _CLIP, ("<image>",), "<image>", _CLIP_PROCESSOR,
        {"processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        {"image_token_index": "id:<image>", "vision_feature_layer": -2, "image_seq_length": 16},
    ),
    "qwen2_vl": VisionFamily(
        "qwen2_vl", {"rope_parameters": _QWEN_ROPE},
        {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4,
         "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_processor=("Qwen2VLImageProcessor", _QWEN_IMAGES), processor={"processor_class": "Qwen2VLProcessor"},
        **_QWEN,
    ),
}  # fmt: skip


def make_tokenizer(folder: Path, tokens: Sequence[str], options: dict[str, Any]) -> Any:
    """A tokenizer of bytes with these special tokens."""
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>", *tokens])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **options
    )
    made.save_pretrained(folder)
    return made


def make_vision_model(name: str, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """A model in float32 and its tokenizer, saved to `folder` with the processor's files."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    family = FAMILIES[name]
    tokenizer = make_tokenizer(folder, family.tokens, family.tokenizer)
    whole = {key: _resolved(value, tokenizer) for key, value in family.whole.items()}
    text = _TEXT | {"vocab_size": len(tokenizer) + 5} | family.text
    config = CONFIG_MAPPING[family.model_type](
        text_config=text, vision_config=family.vision, tie_word_embeddings=False, **whole
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    fill_weights(model, seed)
    if family.prepare is not None:
        family.prepare(model)
    model.save_pretrained(folder)
    kind, options = family.image_processor
    getattr(transformers, kind + "Pil")(**options).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return model, tokenizer


def _resolved(value: Any, tokenizer: Any) -> Any:
    if isinstance(value, str) and value.startswith("id:"):
        return tokenizer.convert_tokens_to_ids(value.removeprefix("id:"))
    return value


def draw(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """A gradient with some shapes and words on it."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3)) * rng.uniform(0.3, 1, 3)
    picture = Image.fromarray(ramp.astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y = rng.integers(0, width), rng.integers(0, height)
        pen.ellipse((x - 9, y - 5, x + 9, y + 7), fill=tuple(rng.integers(0, 256, 3).tolist()))
    pen.text((2, height // 2), f"no {seed}", fill=(255, 255, 0))
    return picture.convert(mode)


class Reference:
    """transformers' processor and model."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._processor = _make_processor(FAMILIES[name], tokenizer)
        forward = inspect.signature(type(model).forward).parameters
        inner = inspect.signature(type(model.base_model).forward).parameters
        self._known = forward.keys() | inner.keys()

    def processed(self, text: str, pictures: Sequence[Image.Image]) -> tuple[list[int], dict[str, Any]]:
        """The prompt's ids, and the model's arguments beside these."""
        if not pictures:
            return self._tokenizer.encode(text), {}
        data = self._processor(text=[text], images=list(pictures), return_tensors="pt")
        values = {key: value for key, value in data.items() if key in self._known}
        return values.pop("input_ids")[0].tolist(), {key: values[key] for key in values if key != "attention_mask"}

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], values: dict[str, Any]) -> np.ndarray:
        """[T, V] of an expanded prompt and tokens after it."""
        values = dict(values)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in values:
                more = torch.zeros(1, len(ids) - values[name].shape[1], dtype=values[name].dtype)
                values[name] = torch.cat([values[name], more], dim=1)
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None
        logits = self.model(input_ids=torch.tensor([list(ids)]), **values).logits[0]
        found: np.ndarray = logits.float().log_softmax(-1).numpy()
        return found


def _make_processor(family: VisionFamily, tokenizer: Any) -> Any:
    import transformers

    kind, options = family.image_processor
    images = getattr(transformers, kind + "Pil")(**options)
    own = dict(family.processor)
    found = getattr(transformers, own.pop("processor_class"))
    if "video_processor" not in found.get_attributes():
        return found(image_processor=images, tokenizer=tokenizer, **own)

    class WithoutVideos(found):
        """transformers' processor of videos wants torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            return None

    return WithoutVideos(image_processor=images, tokenizer=tokenizer, video_processor=None, **own)

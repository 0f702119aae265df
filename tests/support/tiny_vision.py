"""Tiny models that read pictures, with random weights, and transformers' readings of them."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from architectures import ARCHITECTURES, fill_weights
from hybrids import HYBRIDS
from mixtures import MIXTURES
from PIL import Image, ImageDraw
from tokenizers import decoders, models, pre_tokenizers

ASSISTANT = "{% if add_generation_prompt %}assistant:{% endif %}"
"""The end of a chat template that begins the answer."""
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
        seed: of its weights.
        in_own_format: whether its file has transformers' names of tensors: those of the published files that it writes
            are none of theirs.
        options: of the processor, which are none of its files'.
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
    seed: int = 0
    in_own_format: bool = False
    options: dict[str, Any] = field(default_factory=dict)


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
QWEN_IMAGES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 3200}}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
_QWEN3_TOWER = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_IDEFICS_TOWER = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": EDGE,
    "patch_size": 7,
}  # fmt: skip
_IDEFICS_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)  # fmt: skip
_IDEFICS_IMAGES = {"size": {"longest_edge": 2 * EDGE}, "max_image_size": {"longest_edge": EDGE}}
_IDEFICS_WHOLE = {"image_token_id": "id:<image>", "scale_factor": 2}
_IDEFICS_TOKENIZER = {
    "extra_special_tokens": {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
}  # fmt: skip
_PINPOINTS = [[EDGE, 2 * EDGE], [2 * EDGE, EDGE], [2 * EDGE, 2 * EDGE]]
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 7,
}  # fmt: skip
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_GEMMA_4 = {
    "tokens": ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
    "placeholder": "<|image|>",
    "image_processor": ("Gemma4ImageProcessor", {"patch_size": 7, "max_soft_tokens": 70, "pooling_kernel_size": 2}),
    "processor": {"processor_class": "Gemma4Processor"},
    "whole": {"image_token_id": "id:<|image|>", "boi_token_id": "id:<|image>", "eoi_token_id": "id:<image|>",
              "video_token_id": "id:<|video|>", "audio_config": None},
    "tokenizer": {"extra_special_tokens": {"boi_token": "<|image>", "eoi_token": "<image|>",
                                           "image_token": "<|image|>", "audio_token": "<|audio|>",
                                           "boa_token": "<|audio>", "eoa_token": "<audio|>"}},
}  # fmt: skip
_GEMMA_4_TOWER = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 12,
    "num_key_value_heads": 2, "pooling_kernel_size": 2, "patch_size": 7, "position_embedding_size": 32,
}  # fmt: skip
_GLM = {
    "tokens": (
        "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>",
    ),
    "placeholder": "<|begin_of_image|><|image|><|end_of_image|>",
    "whole": {
        "image_token_id": "id:<|image|>", "video_token_id": "id:<|video|>",
        "image_start_token_id": "id:<|begin_of_image|>", "image_end_token_id": "id:<|end_of_image|>",
    },
}  # fmt: skip
_GLM_TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 32,
}  # fmt: skip
_GOT_IMAGES = {"size": {"height": EDGE, "width": EDGE}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_MINICPM = {
    "vision": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3,
               "image_size": EDGE, "patch_size": 4},
    "tokens": ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|image_pad|>",
               "<|video_pad|>"),
    "placeholder": "<|image_pad|>",
    "image_processor": ("MiniCPMV4_6ImageProcessor", {"scale_resolution": 32, "patch_size": 4}),
    "tokenizer": {"extra_special_tokens": {
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
        "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}},
}  # fmt: skip


def _with_lasting_states(model: Any) -> None:
    """By the usual weights a state holds little more than the last token. A head whose query is nearly orthogonal to
    that one's key reads nearly nothing, and the norm of what it read magnifies float32's rounding by hundreds, in
    transformers' module and in ours."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(5)


# The larger epsilon bounds by how much a norm magnifies.
_STATES: dict[str, Any] = {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}, "rms_norm_eps": 1e-2}
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
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen2VLProcessor"},
        **_QWEN,
    ),
    "qwen2_5_vl": VisionFamily(
        "qwen2_5_vl", {"rope_parameters": _QWEN_ROPE},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 4,
         "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen2_5_VLProcessor"},
        **_QWEN,
    ),
    "qwen3_vl": VisionFamily(
        "qwen3_vl", {"head_dim": 8, "rope_parameters": _QWEN_ROPE}, _QWEN3_TOWER,
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen3VLProcessor"},
        **_QWEN,
    ),
    "qwen3_vl_moe": VisionFamily(
        "qwen3_vl_moe",
        # Pictures are added after the last layer, too.
        {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": _QWEN_ROPE, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "norm_topk_prob": True},
        _QWEN3_TOWER,
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen3VLProcessor"},
        **_QWEN,
    ),
    "qwen3_5": VisionFamily(
        "qwen3_5", HYBRIDS["qwen3_5"][1] | _STATES,
        {key: value for key, value in _QWEN3_TOWER.items() if key != "deepstack_visual_indexes"},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen3VLProcessor"},
        **_QWEN, prepare=_with_lasting_states,
    ),
    "qwen3_5_moe": VisionFamily(
        "qwen3_5_moe", HYBRIDS["qwen3_5_moe"][1] | _STATES,
        {key: value for key, value in _QWEN3_TOWER.items() if key != "deepstack_visual_indexes"},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Qwen3VLProcessor"},
        **_QWEN, prepare=_with_lasting_states,
    ),
    "exaone4_5": VisionFamily(
        "exaone4_5", ARCHITECTURES["exaone4"][1] | {"model_type": "exaone4"},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
         "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
         "fullatt_block_indexes": [1]},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Exaone4_5_Processor"},
        **_QWEN | {"whole": {key: _QWEN["whole"][key] for key in ("image_token_id", "video_token_id")}},
    ),
    "gemma3": VisionFamily(
        "gemma3", {"model_type": "gemma3_text"} | ARCHITECTURES["gemma3"][1], _SIGLIP,
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<start_of_image>",
        ("Gemma3ImageProcessor", {"size": {"height": EDGE, "width": EDGE}}),
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {"mm_tokens_per_image": 16, "image_token_index": "id:<image_soft_token>",
         "boi_token_index": "id:<start_of_image>", "eoi_token_index": "id:<end_of_image>"},
        {"extra_special_tokens": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
                                  "image_token": "<image_soft_token>"}},
    ),
    "gemma4": VisionFamily(
        "gemma4", {"model_type": "gemma4_text"} | ARCHITECTURES["gemma4-values-are-keys"][1]
        | {"use_bidirectional_attention": "vision"}, _GEMMA_4_TOWER, **_GEMMA_4,
    ),
    "gemma4_layer_inputs": VisionFamily(
        "gemma4", {"model_type": "gemma4_text"} | ARCHITECTURES["gemma4"][1] | {"vocab_size_per_layer_input": 512},
        # By other weights it generates placeholders of videos, which transformers takes for some.
        _GEMMA_4_TOWER, **_GEMMA_4, seed=1,
    ),
    "ovis2": VisionFamily(
        "ovis2", {"model_type": "qwen2"},
        {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": EDGE, "patch_size": 7, "vocab_size": 40, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
        ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"), "<image>",
        ("Ovis2ImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "max_patches": 4, "crop_to_patches": True}),
        {"processor_class": "Ovis2Processor", "image_seq_length": 4},
        {"image_token_id": "id:<IMG_ATOM>", "hidden_size": 32, "vocab_size": "vocab",
         "visual_indicator_token_ids": ["id:<IMG_START>", "id:<IMG_GRID>", "id:<IMG_COL>", "id:<IMG_ROW>",
                                        "id:<IMG_END>"]},
    ),
    "smolvlm": VisionFamily(
        "smolvlm", {"model_type": "llama"}, _IDEFICS_TOWER | {"model_type": "smolvlm_vision"}, _IDEFICS_TOKENS,
        "<image>", ("SmolVLMImageProcessor", _IDEFICS_IMAGES),
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}, _IDEFICS_WHOLE, _IDEFICS_TOKENIZER,
    ),
    "idefics3": VisionFamily(
        "idefics3", {"model_type": "llama"}, _IDEFICS_TOWER | {"model_type": "idefics3_vision"}, _IDEFICS_TOKENS,
        "<image>", ("Idefics3ImageProcessor", _IDEFICS_IMAGES),
        {"processor_class": "Idefics3Processor", "image_seq_len": 4}, _IDEFICS_WHOLE, _IDEFICS_TOKENIZER,
    ),
    "llava_next": VisionFamily(
        "llava_next", {"model_type": "mistral"}, _CLIP, ("<image>",), "<image>",
        ("LlavaNextImageProcessor", _CLIP_PROCESSOR[1] | {"image_grid_pinpoints": _PINPOINTS}),
        {"processor_class": "LlavaNextProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        {"image_token_index": "id:<image>", "vision_feature_layer": -2, "image_grid_pinpoints": _PINPOINTS},
    ),
    "llava_onevision": VisionFamily(
        "llava_onevision", {"model_type": "qwen2"}, _SIGLIP | {"vision_use_head": False}, ("<image>", "<video>"),
        "<image>",
        ("LlavaOnevisionImageProcessor",
         {"size": {"height": EDGE, "width": EDGE}, "image_grid_pinpoints": _PINPOINTS}),
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16,
         "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        {"image_token_index": "id:<image>", "video_token_index": "id:<video>", "image_grid_pinpoints": _PINPOINTS},
    ),
    "mistral3": VisionFamily(
        "mistral3", {"model_type": "mistral", "sliding_window": None, "head_dim": 8}, _PIXTRAL, _PIXTRAL_TOKENS,
        "[IMG]", ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}),
        {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2},
        {"image_token_index": "id:[IMG]", "spatial_merge_size": 2},
    ),
    "pixtral": VisionFamily(
        "llava", {"model_type": "mistral", "sliding_window": None, "head_dim": 8}, _PIXTRAL, _PIXTRAL_TOKENS,
        "[IMG]", ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}}),
        {"processor_class": "PixtralProcessor", "patch_size": 7},
        {"image_token_index": "id:[IMG]", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "lighton_ocr": VisionFamily(
        "lighton_ocr", {"model_type": "qwen3", "head_dim": 8}, _PIXTRAL, ("<|image_pad|>", "<|break|>", "<|end|>"),
        "<|image_pad|>",
        ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}),
        {"processor_class": "LightOnOcrProcessor", "patch_size": 7, "spatial_merge_size": 2},
        {"image_token_id": "id:<|image_pad|>", "spatial_merge_size": 2},
        {"extra_special_tokens": {"image_token": "<|image_pad|>", "image_break_token": "<|break|>",
                                  "image_end_token": "<|end|>"}},
    ),
    "internvl": VisionFamily(
        "internvl", {"model_type": "qwen2"},
        {"model_type": "internvl_vision", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": [EDGE, EDGE], "patch_size": [7, 7]},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"), "<IMG_CONTEXT>", ("GotOcr2ImageProcessor", _GOT_IMAGES),
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"image_token_id": "id:<IMG_CONTEXT>", "image_seq_length": 4, "downsample_ratio": 0.5},
        {"extra_special_tokens": {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
                                  "context_image_token": "<IMG_CONTEXT>"}},
    ),
    "paligemma": VisionFamily(
        "paligemma", {"model_type": "gemma", "head_dim": 8}, _SIGLIP | {"projection_dim": 32}, ("<image>",), "<image>",
        ("SiglipImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "image_seq_length": 16}),
        {"processor_class": "PaliGemmaProcessor"},
        {"image_token_index": "id:<image>", "projection_dim": 32, "hidden_size": 32},
        {"extra_special_tokens": {"image_token": "<image>"}},
    ),
    "paligemma2": VisionFamily(
        "paligemma", ARCHITECTURES["gemma2"][1] | {"model_type": "gemma2", "head_dim": 8},
        _SIGLIP | {"projection_dim": 32}, ("<image>",), "<image>",
        ("SiglipImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "image_seq_length": 16}),
        {"processor_class": "PaliGemmaProcessor"},
        {"image_token_index": "id:<image>", "projection_dim": 32, "hidden_size": 32},
        {"extra_special_tokens": {"image_token": "<image>"}},
    ),
    "vipllava": VisionFamily(
        "vipllava", {"model_type": "llama"}, _CLIP, ("<image>",), "<image>", _CLIP_PROCESSOR,
        {"processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        {"image_token_index": "id:<image>", "vision_feature_layers": [-2, 1], "image_seq_length": 16},
    ),
    "janus": VisionFamily(
        "janus", {"model_type": "llama"},
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": EDGE, "patch_size": 7,
         "projection_dim": 32, "num_image_tokens": 16},
        ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"), "<image_placeholder>",
        ("JanusImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "min_size": 7}),
        {"processor_class": "JanusProcessor", "num_image_tokens": 16},
        {"image_token_id": "id:<image_placeholder>",
         "vq_config": {"embed_dim": 4, "num_embeddings": 8, "latent_channels": 8, "base_channels": 32,
                       "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 2, "projection_dim": 8,
                       "image_token_embed_dim": 8}},
        {"extra_special_tokens": {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>",
                                  "eoi_token": "<end_of_image>"}},
    ),
    "deepseek_vl": VisionFamily(
        "deepseek_vl", {"model_type": "llama"}, _SIGLIP | {"vision_use_head": False}, ("<image_placeholder>",),
        "<image_placeholder>",
        ("DeepseekVLImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "min_size": 7}),
        {"processor_class": "DeepseekVLProcessor", "num_image_tokens": 16},
        {"image_token_id": "id:<image_placeholder>"},
        {"extra_special_tokens": {"image_token": "<image_placeholder>"}},
    ),
    "glm4v_moe": VisionFamily(
        "glm4v_moe",
        {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}, "moe_intermediate_size": 16, "n_group": 1,
         "num_experts_per_tok": 2, "n_routed_experts": 4, "head_dim": 8},
        _GLM_TOWER, image_processor=("Glm4vImageProcessor", QWEN_IMAGES),
        processor={"processor_class": "Glm4vProcessor"}, **_GLM,
    ),
    "glm46v": VisionFamily(
        "glm46v", {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}, "model_type": "glm4v_text"},
        _GLM_TOWER | {"model_type": "glm4v_vision"}, image_processor=("Glm46VImageProcessor", QWEN_IMAGES),
        processor={"processor_class": "Glm46VProcessor"}, **_GLM,
    ),
    "glm4v": VisionFamily(
        "glm4v", {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}}, _GLM_TOWER,
        image_processor=("Glm4vImageProcessor", QWEN_IMAGES), processor={"processor_class": "Glm4vProcessor"}, **_GLM,
    ),
    "hyperclovax_vision_v2": VisionFamily(
        "hyperclovax_vision_v2", ARCHITECTURES["hyperclovax"][1] | {"model_type": "hyperclovax"},
        {"model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
         "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
         "fullatt_block_indexes": [1]},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES),
        processor={"processor_class": "HyperCLOVAXVisionV2Processor"},
        **_QWEN | {"whole": {key: _QWEN["whole"][key] for key in ("image_token_id", "video_token_id")}},
    ),
    "lfm3_vl": VisionFamily(
        "lfm3_vl", HYBRIDS["lfm3"][1] | {"model_type": "lfm3"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_processor=("Qwen2VLImageProcessor", QWEN_IMAGES), processor={"processor_class": "Lfm3VlProcessor"},
        **_QWEN | {"whole": _QWEN["whole"] | {"projector_hidden_size": 24}},
    ),
    "glm_ocr": VisionFamily(
        "glm_ocr", {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}, "head_dim": 8}, _GLM_TOWER,
        image_processor=("Glm46VImageProcessor", QWEN_IMAGES),
        processor={"processor_class": "Glm46VProcessor"}, **_GLM,
    ),
    "paddleocr_vl": VisionFamily(
        "paddleocr_vl", {"rope_parameters": _QWEN_ROPE, "head_dim": 8},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
         "patch_size": 4, "spatial_merge_size": 2},
        image_processor=("PaddleOCRVLImageProcessor", QWEN_IMAGES | {"temporal_patch_size": 1}),
        processor={"processor_class": "PaddleOCRVLProcessor"},
        tokenizer={"extra_special_tokens": {"image_token": "<|image_pad|>"}}, **_QWEN,
    ),
    "aria": VisionFamily(
        "aria", MIXTURES["aria_text"][1] | {"model_type": "aria_text"},
        # Its processor knows no other size.
        _IDEFICS_TOWER | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 245}, ("<|img|>",),
        "<|img|>", ("AriaImageProcessor", {}), {"processor_class": "AriaProcessor", "size_conversion": {980: 4}},
        {"image_token_index": "id:<|img|>", "projector_patch_to_query_dict": {16: 4}},
        {"extra_special_tokens": {"image_token": "<|img|>"}},
    ),
    "llava_next_video": VisionFamily(
        "llava_next_video", {"model_type": "llama"}, _CLIP, ("<image>", "<video>"), "<image>",
        ("LlavaNextImageProcessor", _CLIP_PROCESSOR[1] | {"image_grid_pinpoints": _PINPOINTS}),
        {"processor_class": "LlavaNextVideoProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        {"image_token_index": "id:<image>", "video_token_index": "id:<video>", "vision_feature_layer": -2,
         "image_grid_pinpoints": _PINPOINTS},
    ),
    "got_ocr2": VisionFamily(
        "got_ocr2", {"model_type": "qwen2"},
        {"hidden_size": 12, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
         "patch_size": 4, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 16},
        ("<imgpad>", "<img>", "</img>"), "<imgpad>",
        ("GotOcr2ImageProcessor", {"size": {"height": 64, "width": 64}}), {"processor_class": "GotOcr2Processor"},
        {"image_token_index": "id:<imgpad>", "image_seq_length": 16}, options={"num_image_tokens": 16},
    ),
    "qianfan_ocr": VisionFamily(
        "qianfan_ocr", {"model_type": "qwen3", "head_dim": 8},
        {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": [EDGE, EDGE], "patch_size": [7, 7]},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<image>"), "<image>", ("GotOcr2ImageProcessor", _GOT_IMAGES),
        {"processor_class": "QianfanOCRProcessor", "image_seq_length": 4},
        {"image_token_id": "id:<IMG_CONTEXT>", "image_seq_length": 4},
        {"extra_special_tokens": {"start_image_token": "<img>", "end_image_token": "</img>",
                                  "context_image_token": "<IMG_CONTEXT>"}}, in_own_format=True,
    ),
    "minicpmv4_6": VisionFamily(
        "minicpmv4_6", HYBRIDS["qwen3_5"][1] | {"model_type": "qwen3_5_text"}, processor={
            "processor_class": "MiniCPMV4_6Processor"},
        whole={"image_token_id": "id:<|image_pad|>", "video_token_id": "id:<|video_pad|>", "insert_layer_id": 1},
        **_MINICPM,
    ),
    "minicpmv4_7": VisionFamily(
        "minicpmv4_7",
        HYBRIDS["qwen3_5"][1] | {
            "model_type": "qwen3_5_text", "rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}},
        processor={"processor_class": "MiniCPMV4_7Processor"},
        whole={"image_token_id": "id:<|image_pad|>", "video_token_id": "id:<|video_pad|>", "insert_layer_id": 1,
               "image_start_id": "id:<image>", "image_end_id": "id:</image>", "slice_start_id": "id:<slice>",
               "slice_end_id": "id:</slice>", "newline_id": "id:Ċ"},
        **_MINICPM,
    ),
    "video_llama_3": VisionFamily(
        "video_llama_3", {"model_type": "qwen2"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
        ("<|image_pad|>", "<|video_pad|>"), "<|image_pad|>",
        ("VideoLlama3ImageProcessor", {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}),
        {"processor_class": "VideoLlama3Processor"},
        {"image_token_id": "id:<|image_pad|>", "video_token_id": "id:<|video_pad|>"},
    ),
    "granite4_vision": VisionFamily(
        "granite4_vision",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4, "logits_scaling": 0.5},
        _SIGLIP | {"hidden_size": 64, "num_attention_heads": 2, "vision_use_head": False}, ("<image>",), "<image>",
        ("LlavaNextImageProcessor",
         {**_CLIP_PROCESSOR[1], "image_grid_pinpoints": _PINPOINTS}),
        {"processor_class": "Granite4VisionProcessor", "patch_size": 7, "vision_feature_select_strategy": "full",
         "downsample_rate": "1/2"},
        {"image_token_index": "id:<image>", "image_grid_pinpoints": _PINPOINTS, "downsample_rate": "1/2",
         "vision_feature_select_strategy": "full", "deepstack_layer_map": [[-2, 2], [-1, 0]],
         "spatial_target_layers": [1, 3, 1, 2], "projector_dropout": 0.0,
         "qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32,
                            "cross_attention_frequency": 1, "use_qformer_text_input": False}},
    ),
    "deepseek_vl_hybrid": VisionFamily(
        "deepseek_vl_hybrid", {"model_type": "llama"}, _SIGLIP | {"vision_use_head": False}, ("<image_placeholder>",),
        "<image_placeholder>",
        ("DeepseekVLHybridImageProcessor",
         {"size": {"height": EDGE, "width": EDGE}, "high_res_size": {"height": 64, "width": 64}, "min_size": 7}),
        {"processor_class": "DeepseekVLHybridProcessor", "num_image_tokens": 16},
        {"image_token_id": "id:<image_placeholder>",
         "high_res_vision_config": {
             "model_type": "sam_vision_model", "hidden_size": 12, "output_channels": 8, "num_hidden_layers": 2,
             "num_attention_heads": 2, "image_size": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1],
             "mlp_dim": 16}},
        {"extra_special_tokens": {"image_token": "<image_placeholder>"}},
    ),
    "deepseek_ocr2": VisionFamily(
        "deepseek_ocr2",
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "routed_scaling_factor": 0.7,
         "max_position_embeddings": 2048},
        # It has tables for 12 x 12 and for 16 x 16 patches.
        {"sam_config": {"hidden_size": 12, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
                        "image_size": 64, "patch_size": 1, "window_size": 4, "global_attn_indexes": [1],
                        "mlp_dim": 16, "downsample_channels": [8, 24]},
         "encoder_config": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "num_key_value_heads": 2}},
        ("<image>",), "<image>",
        ("DeepseekOcr2ImageProcessor",
         {"size": {"height": 64, "width": 64}, "tile_size": 48, "max_patches": 2}),
        {"processor_class": "DeepseekOcr2Processor", "patch_size": 1, "downsample_ratio": 4},
        {"image_token_id": "id:<image>"}, {"extra_special_tokens": {"image_token": "<image>"}},
    ),
    "aya_vision": VisionFamily(
        "aya_vision", {"model_type": "cohere2"} | ARCHITECTURES["cohere2"][1], _SIGLIP | {"vision_use_head": False},
        ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", "TILE"),
        "<image>", ("GotOcr2ImageProcessor", _GOT_IMAGES),
        {"processor_class": "AyaVisionProcessor", "patch_size": 7, "img_size": EDGE, "downsample_factor": 2},
        {"image_token_index": "id:<|IMG_PATCH|>", "downsample_factor": 2},
    ),
}  # fmt: skip


def _with_picture_outputs(model: Any) -> None:
    """transformers' forward of Llama 4 asks its decoder's output for a field that this does not have."""
    forward = model.language_model.forward

    def forwarded(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        found.image_outputs = None
        return found

    model.language_model.forward = forwarded


def _with_masks_of_generate(model: Any) -> None:
    """transformers' forward of the unified Gemma 4 makes other masks of pictures than its generate, which has those of
    Gemma 4: they see each other in layers with a window."""
    forward = model.forward

    def forwarded(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        masks = model.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.zeros(*input_ids.shape, model.config.get_text_config().hidden_size),
            attention_mask=None,
            cache=None,
            position_ids=None,
            mm_token_type_ids=kwargs.get("mm_token_type_ids"),
        )
        return forward(input_ids=input_ids, attention_mask=masks, **kwargs)

    model.forward = forwarded


WITH_TORCHVISION: dict[str, VisionFamily] = {
    "llama4": VisionFamily(
        "llama4", MIXTURES["llama4"][1] | {"model_type": "llama4_text"},
        {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": EDGE, "patch_size": 7, "vision_output_dim": 20, "projector_input_dim": 20,
         "projector_output_dim": 20},
        ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        "<|image|>",
        ("Llama4ImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "max_patches": 4}),
        {"processor_class": "Llama4Processor", "patch_size": 7},
        {"image_token_index": "id:<|patch|>", "boi_token_index": "id:<|image_start|>",
         "eoi_token_index": "id:<|image_end|>"},
        prepare=_with_picture_outputs,
    ),
    "gemma4_unified": VisionFamily(
        "gemma4_unified",
        {"model_type": "gemma4_unified_text"} | ARCHITECTURES["gemma4-values-are-keys"][1]
        | {"use_bidirectional_attention": "vision"},
        {"patch_size": 7, "pooling_kernel_size": 2, "mm_embed_dim": 24, "mm_posemb_size": 32, "output_proj_dims": 24},
        **_GEMMA_4 | {
            "image_processor": ("Gemma4UnifiedImageProcessor", _GEMMA_4["image_processor"][1]),
            "processor": {"processor_class": "Gemma4UnifiedProcessor"}, "prepare": _with_masks_of_generate},
    ),
    "lfm2_vl": VisionFamily(
        "lfm2_vl", HYBRIDS["lfm2"][1] | {"model_type": "lfm2"},
        {"model_type": "siglip2_vision_model", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "patch_size": 4, "num_patches": 16, "vision_use_head": False},
        ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
         *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4))), "<image>",
        ("Lfm2VlImageProcessor",
         {"tile_size": 16, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 4, "encoder_patch_size": 4}),
        {"processor_class": "Lfm2VlProcessor"}, {"image_token_id": "id:<image>", "projector_hidden_size": 24},
    ),
    "cohere2_vision": VisionFamily(
        "cohere2_vision", ARCHITECTURES["cohere2"][1] | {"model_type": "cohere2"}, _SIGLIP | {"vision_use_head": False},
        ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"), "<|IMG_PATCH|>",
        ("Cohere2VisionImageProcessor", {"size": {"height": EDGE, "width": EDGE}, "max_patches": 4, "patch_size": 2}),
        {"processor_class": "Cohere2VisionProcessor"},
        {"image_token_id": "id:<|IMG_PATCH|>", "alignment_intermediate_size": 32},
        {"extra_special_tokens": {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
                                  "image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}},
    ),
    "kimi_k25": VisionFamily(
        "kimi_k25", MIXTURES["deepseek_v3"][1] | {"model_type": "deepseek_v3"},
        {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2, "num_attention_heads": 2,
         "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32},
        ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        ("Kimi_K25ImageProcessor", {"patch_size": 4, "merge_size": 2, "size": {"max_height": 8, "max_width": 8}}),
        {"processor_class": "Kimi_K25Processor"},
        {"image_token_id": "id:<|media_pad|>", "projection_hidden_size": 32}, in_own_format=True,
    ),
}  # fmt: skip
"""Families whose picture processor is torchvision's alone; where that is missing, see with_torchvision.py."""
if importlib.util.find_spec("torchvision") is not None:
    FAMILIES |= WITH_TORCHVISION

WITH_TIMM: dict[str, VisionFamily] = {
    "gemma3n": VisionFamily(
        "gemma3n", {"model_type": "gemma3n_text"} | ARCHITECTURES["gemma3n"][1],
        {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048,
         "model_args": {"channel_multiplier": 0.02, "msfa_output_resolution": 4}},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<audio>", "<boa>", "<eoa>"), "<image_soft_token>",
        ("SiglipImageProcessor", {"size": {"height": 64, "width": 64}}),
        {"processor_class": "Gemma3nProcessor", "image_seq_length": 16},
        {"vision_soft_tokens_per_image": 16, "image_token_id": "id:<image_soft_token>",
         "boi_token_id": "id:<start_of_image>", "eoi_token_id": "id:<end_of_image>", "audio_token_id": "id:<audio>",
         "audio_config": {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2,
                          "sscp_conv_channel_size": [8, 4]}},
        {"extra_special_tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                                  "eoi_token": "<end_of_image>", "audio_token": "<audio>", "boa_token": "<boa>",
                                  "eoa_token": "<eoa>"}},
    ),
    "fast_vlm": VisionFamily(
        "fast_vlm", {"model_type": "qwen2"},
        {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "do_pooling": True, "global_pool": "avg",
         "hidden_size": 128, "model_args": {"inference_mode": True, "embed_dims": [16, 16, 32, 32, 64],
                                             "layers": [1, 1, 1, 1, 1]}},
        ("<image>",), "<image>",
        ("CLIPImageProcessor", {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}}),
        {"processor_class": "LlavaProcessor", "patch_size": 64, "vision_feature_select_strategy": "full"},
        {"image_token_index": "id:<image>", "image_seq_length": 4},
    ),
    "perception_lm": VisionFamily(
        "perception_lm", {"model_type": "llama"},
        {"model_type": "timm_wrapper", "architecture": "vit_pe_core_tiny_patch16_384",
         "model_args": {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": [EDGE, EDGE], "patch_size": 7,
                        "ref_feat_shape": [4, 4]}},
        ("<|image|>", "<|video|>"), "<|image|>",
        # transformers' makes nothing of pictures of different tiles in one prompt.
        ("PerceptionLMImageProcessor", {"tile_size": EDGE, "vision_input_type": "vanilla"}),
        {"processor_class": "PerceptionLMProcessor", "patch_size": 7, "pooling_ratio": 2},
        {"image_token_id": "id:<|image|>", "video_token_id": "id:<|video|>", "projector_pooling_ratio": 2},
        {"extra_special_tokens": {"image_token": "<|image|>", "video_token": "<|video|>"}},
        seed=1,  # by other weights it generates placeholders
    ),
}  # fmt: skip
"""Families whose tower is timm's, which asks for torchvision itself."""
if importlib.util.find_spec("timm") is not None:
    FAMILIES |= WITH_TIMM


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


def make_chat_model(name: str, folder: Path, ending: str = "") -> tuple[Any, Any]:
    """The same with a chat template: each message is "role:" and its parts in their order; `ending` comes after all."""
    made, picture = make_vision_model(name, folder), FAMILIES[name].placeholder
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + picture + "{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}" + ending
    )
    return made


def make_vision_model(name: str, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """A model in float32 and its tokenizer, saved to `folder` with the processor's files."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    family = FAMILIES[name]
    tokenizer = make_tokenizer(folder, family.tokens, family.tokenizer)
    whole = {key: _resolved(value, tokenizer) for key, value in family.whole.items()}
    text = _TEXT | {"vocab_size": len(tokenizer) + 5} | family.text
    config = CONFIG_MAPPING[family.model_type](
        text_config=text, vision_config=family.vision, tie_word_embeddings=False, **whole
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    fill_weights(model, seed or family.seed)
    if family.prepare is not None:
        family.prepare(model)
    model.save_pretrained(folder, save_original_format=not family.in_own_format)
    _image_processor(family).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return model, tokenizer


def _image_processor(family: VisionFamily) -> Any:
    kind, options = family.image_processor
    return getattr(transformers, kind + "Pil" if hasattr(transformers, kind + "Pil") else kind)(**options)


def _resolved(value: Any, tokenizer: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(each, tokenizer) for each in value]
    if value == "vocab":
        return len(tokenizer) + 5
    if isinstance(value, str) and value.startswith("id:"):
        return tokenizer.convert_tokens_to_ids(value.removeprefix("id:"))
    return value


def prompt_of_two(name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """A prompt of a family's with the pictures that these two seeds draw."""
    place = FAMILIES[name].placeholder
    text = f"one{place} two and more words{place} three and yet more words"
    return {"prompt": text, "multi_modal_data": {"image": [draw(40, 40, seed) for seed in seeds]}}


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
        self._processor, self._options = _make_processor(FAMILIES[name], tokenizer), FAMILIES[name].options
        forward = inspect.signature(type(model).forward).parameters
        inner = inspect.signature(type(model.base_model).forward).parameters
        self._known = forward.keys() | inner.keys()
        self._found: dict[Any, np.ndarray] = {}

    def processed(self, text: str, pictures: Sequence[Image.Image]) -> tuple[list[int], dict[str, Any]]:
        """The prompt's ids, and the model's arguments beside these."""
        if not pictures:
            return self._tokenizer.encode(text), {}
        data = self._processor(text=[text], images=list(pictures), return_tensors="pt", **self._options)
        values = {key: value for key, value in data.items() if key in self._known}
        ids = values.pop("input_ids")[0].tolist()
        if (pixels := values.get("pixel_values")) is not None:
            values["pixel_values"] = pixels.float()  # Llama 4's are bfloat16
        return ids, {key: value for key, value in values.items() if key not in ("attention_mask", "labels")}

    def logprobs(self, ids: Sequence[int], values: dict[str, Any]) -> np.ndarray:
        """[T, V] of an expanded prompt and tokens after it."""
        asked = tuple(ids), *(value.numpy().tobytes() for _, value in sorted(values.items()))
        if asked not in self._found:
            self._found[asked] = self._logprobs(ids, dict(values))
        return self._found[asked]

    @torch.no_grad()
    def _logprobs(self, ids: Sequence[int], values: dict[str, Any]) -> np.ndarray:
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in values:
                # PaliGemma's ones are causal.
                kind = int(self.model.config.model_type == "paligemma")
                more = torch.full((1, len(ids) - values[name].shape[1]), kind, dtype=values[name].dtype)
                values[name] = torch.cat([values[name], more], dim=1)
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None
        logits = self.model(input_ids=torch.tensor([list(ids)]), **values).logits[0]
        found: np.ndarray = logits.float().log_softmax(-1).numpy()
        return found


def _real(name: str) -> Any:
    """A processor's class, also where transformers has a stand-in that asks for torchvision or num2words."""
    if name == "PixtralProcessor":
        # transformers' own does not load without torchvision.
        from vllm.models.vision.pixtral import PixtralProcessor

        return PixtralProcessor
    if name == "SmolVLMProcessor":
        from transformers.models.smolvlm import processing_smolvlm

        processing_smolvlm.num2words = processing_smolvlm.num2words or str
    return getattr(transformers, name)


def _make_processor(family: VisionFamily, tokenizer: Any) -> Any:
    return make_processor(_image_processor(family), tokenizer, family.processor)


def make_processor(images: Any, tokenizer: Any, options: dict[str, Any]) -> Any:
    """transformers' processor with the options of a processor_config.json."""
    own = dict(options)
    found = _real(own.pop("processor_class"))
    others = {part: None for part in found.get_attributes() if part not in ("image_processor", "tokenizer")}
    if found.__name__.startswith("MiniCPM"):
        others["video_processor"] = images  # it asks this for options that the picture's has, too
    if not others:
        return found(image_processor=images, tokenizer=tokenizer, **own)

    class PicturesAlone(found):
        """transformers' processor of videos wants torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            return None

    return PicturesAlone(image_processor=images, tokenizer=tokenizer, **others, **own)


RETRIEVERS = {"ColQwen2": "qwen2_vl", "ColPali": "paligemma"}
"""Models of transformers that embed each token, and the families that they are made of."""


def make_retriever(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """A retriever in float32, its tokenizer and its family's processor, saved to `folder` as its authors do."""
    family = FAMILIES[RETRIEVERS[kind]]
    tokenizer = make_tokenizer(folder, family.tokens, family.tokenizer)
    whole = {key: _resolved(value, tokenizer) for key, value in family.whole.items()}
    text = _TEXT | {"vocab_size": len(tokenizer) + 5} | family.text
    inner = transformers.CONFIG_MAPPING[family.model_type](
        text_config=text, vision_config=family.vision, tie_word_embeddings=False, **whole
    )
    config = getattr(transformers, f"{kind}Config")(vlm_config=inner, embedding_dim=12)
    model = getattr(transformers, f"{kind}ForRetrieval")(config).float().eval()
    model.set_attn_implementation("eager")
    fill_weights(model, 0)
    model.save_pretrained(folder)
    images, options = family.image_processor
    getattr(transformers, images + "Pil")(**options).save_pretrained(folder)
    own = family.processor | {"processor_class": f"{kind}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(own))
    return model, tokenizer, _make_processor(family, tokenizer)

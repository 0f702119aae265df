"""llama.cpp's mmproj files: the picture tower and the projector of a text decoder that is a GGUF file of its own.

Keys and names are those of llama.cpp's converter (the models of convert_hf_to_gguf.py that it calls MmprojModel).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.exceptions import shown
from vllm.loader.gguf.changes import Weight
from vllm.loader.gguf.config_parts import Config
from vllm.loader.gguf.file import GGUFFile

# Entries that say what the tensors show, or what is the same in all files of a projector.
_HARMLESS = {
    f"clip.{key}" for key in ("has_vision_encoder", "has_text_encoder", "has_llava_projector", "vision.projector_type")
}
_EPSILON = 1e-6
_SECOND = "v.patch_embd.weight.1"  # of a convolution over two frames


class ClipHeader:
    """Typed access to the entries under `clip.`. All methods raise ValueError, which names the file and the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._read: set[str] = set(_HARMLESS)
        if file.metadata.get("general.architecture") != "clip":
            raise self.error("mmproj must be llama.cpp's file of a picture tower (general.architecture is not clip)")

    def error(self, problem: str) -> ValueError:
        """An error that names the file."""
        return ValueError(f"{self.file.path.name}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of clip.KEY, or `default`."""
        self._read.add(f"clip.{key}")
        value = self.file.metadata.get(f"clip.{key}", default)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"clip.{key} must be finite, got {value}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """The positive integer of clip.vision.KEY."""
        value = self.get(f"vision.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"clip.vision.{key} must be a positive integer, got {shown(value)}")
        return value

    def shape(self, tensor: str, dimensions: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor that must be there, with so many dimensions."""
        if tensor not in self.file.tensors:
            raise self.error(f"has no tensor {tensor}")
        shape = self.file.tensors[tensor].shape
        if dimensions is not None and len(shape) != dimensions:
            raise self.error(f"{tensor} must have {dimensions} dimensions, got shape {shape}")
        return shape

    def pixels(self) -> Config:
        """The picture processor's mean and deviation."""
        found = {f"image_{name}": self.get(f"vision.image_{name}") for name in ("mean", "std")}
        for name, values in found.items():
            if not isinstance(values, list) or len(values) != 3 or not all(isinstance(each, float) for each in values):
                raise self.error(f"clip.vision.{name} must be three numbers, got {shown(values)}")
        return found

    def check_unread(self) -> None:
        """ValueError: there are entries that nothing read, which ask for something."""
        given = {key for key, value in self.file.metadata.items() if key.startswith("clip.") and value is not False}
        if unread := sorted(given - self._read):
            raise self.error(f"{unread[0]} is not known for this projector")


@dataclass(frozen=True)
class Projector:
    """A value of clip.projector_type, as a model of transformers.

    Attributes:
        decoder: general.architecture of its text decoders.
        name: what config.json's `architectures` has.
        model_type: of config.json; `text_type` is the decoder's.
        config: config.json's other entries.
        processor: the files of the processor, by their names.
        names: the checkpoint's names of the file's tensors, of "blk" those of a block.
        tokens: entries of config.json that are tokens' numbers.
        tokenizer: the tokenizer's own names of tokens.
        activation: the one that the header may name; None: it names none.
    """

    decoder: str
    name: str
    model_type: str
    text_type: str
    config: Callable[[ClipHeader], Config]
    processor: Callable[[ClipHeader], dict[str, Config]]
    names: Mapping[str, str]
    tokens: Mapping[str, str]
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    activation: str | None = None


def _usual(h: ClipHeader, kind: str) -> Config:
    return {
        "model_type": kind,
        "hidden_size": h.size("embedding_length"),
        "intermediate_size": h.size("feed_forward_length"),
        "num_hidden_layers": h.size("block_count"),
        "num_attention_heads": h.size("attention.head_count"),
        "image_size": h.size("image_size"),
        "patch_size": h.size("patch_size"),
        "layer_norm_eps": h.get("vision.attention.layer_norm_epsilon", _EPSILON),
    }


def _patches_across(h: ClipHeader, scale: int) -> int:
    """The rows of a picture along an edge."""
    return h.size("image_size") // h.size("patch_size") // scale


def _gemma3(h: ClipHeader) -> Config:
    return {
        "vision_config": _usual(h, "siglip_vision_model") | {"vision_use_head": False},
        "mm_tokens_per_image": _patches_across(h, h.size("projector.scale_factor", 4)) ** 2,
    }


def _gemma3_processor(h: ClipHeader) -> dict[str, Config]:
    edge = h.size("image_size")
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": edge, "width": edge}}
    count = _patches_across(h, h.size("projector.scale_factor", 4)) ** 2
    return _processor_files(images | h.pixels(), {"processor_class": "Gemma3Processor", "image_seq_length": count})


def _idefics3(h: ClipHeader) -> Config:
    return {
        "vision_config": _usual(h, "idefics3_vision"),
        "scale_factor": h.size("projector.scale_factor"),
    }


def _idefics3_processor(h: ClipHeader) -> dict[str, Config]:
    edge = h.size("image_size")
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": h.size("preproc_image_size", edge)},
        "max_image_size": {"longest_edge": edge},
    }
    count = _patches_across(h, h.size("projector.scale_factor")) ** 2
    return _processor_files(images | h.pixels(), {"processor_class": "Idefics3Processor", "image_seq_len": count})


def _qwen_tower(h: ClipHeader) -> Config:
    epsilon = h.get("vision.attention.layer_norm_epsilon", _EPSILON)
    if not math.isclose(epsilon, _EPSILON, rel_tol=1e-3):
        raise h.error(f"clip.vision.attention.layer_norm_epsilon must be {_EPSILON}, got {epsilon}")
    h.size("image_size")  # pictures are of any size
    return {
        "depth": h.size("block_count"),
        "num_heads": h.size("attention.head_count"),
        "patch_size": h.size("patch_size"),
        "spatial_merge_size": h.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2(h: ClipHeader) -> Config:
    width = h.size("embedding_length")
    h.size("feed_forward_length")  # files say the projection's size here
    ratio = h.shape("v.blk.0.ffn_up.bias")[0] // width
    own = {"embed_dim": width, "hidden_size": h.size("projection_dim"), "mlp_ratio": ratio}
    return {"vision_config": _qwen_tower(h) | own}


def _qwen2_5(h: ClipHeader) -> Config:
    depth, pattern = h.size("block_count"), h.size("n_wa_pattern")
    own = {
        "hidden_size": h.size("embedding_length"),
        "intermediate_size": h.size("feed_forward_length"),
        "out_hidden_size": h.size("projection_dim"),
        "window_size": h.size("window_size", 112),
        "fullatt_block_indexes": list(range(pattern - 1, depth, pattern)),
    }
    return {"vision_config": _qwen_tower(h) | own}


def _qwen_processor(h: ClipHeader) -> dict[str, Config]:
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": h.size("patch_size"),
        "merge_size": h.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        **h.pixels(),
    }
    limits = {"shortest_edge": "image_min_pixels", "longest_edge": "image_max_pixels"}
    size = {name: h.get(f"vision.{key}") for name, key in limits.items()}
    if None not in size.values():
        images["size"] = size
    return _processor_files(images, {"processor_class": "Qwen2VLProcessor"})


def _processor_files(images: Config, processor: Config) -> dict[str, Config]:
    return {"preprocessor_config.json": images, "processor_config.json": processor}


def _siglip_names(tower: str, more: Mapping[str, str]) -> dict[str, str]:
    own = {
        "patch_embd": "embeddings.patch_embedding",
        "position_embd": "embeddings.position_embedding",
        "post_ln": "post_layernorm",
        "blk.{}.ln1": "encoder.layers.{}.layer_norm1",
        "blk.{}.ln2": "encoder.layers.{}.layer_norm2",
        "blk.{}.attn_out": "encoder.layers.{}.self_attn.out_proj",
        "blk.{}.ffn_up": "encoder.layers.{}.mlp.fc1",
        "blk.{}.ffn_down": "encoder.layers.{}.mlp.fc2",
        **{f"blk.{{}}.attn_{each}": f"encoder.layers.{{}}.self_attn.{each}_proj" for each in "qkv"},
    }
    return {f"v.{part}": f"{tower}.{name}" for part, name in own.items()} | dict(more)


def _qwen_names(mlp: Mapping[str, str]) -> dict[str, str]:
    own = {
        "v.post_ln": "merger.ln_q",
        "mm.0": "merger.mlp.0",
        "mm.2": "merger.mlp.2",
        "v.patch_embd": "patch_embed.proj",
        "v.blk.{}.ln1": "blocks.{}.norm1",
        "v.blk.{}.ln2": "blocks.{}.norm2",
        "v.blk.{}.attn_q": "blocks.{}.attn.qkv",
        "v.blk.{}.attn_out": "blocks.{}.attn.proj",
        **{f"v.blk.{{}}.ffn_{part}": f"blocks.{{}}.mlp.{name}" for part, name in mlp.items()},
    }
    return {part: f"visual.{name}" for part, name in own.items()}


_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GEMMA_3_TOKENS = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        "gemma3_text",
        _gemma3,
        _gemma3_processor,
        _siglip_names(
            "vision_tower",
            {
                "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
                "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            },
        ),
        _GEMMA_3_TOKENS,
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "gelu",
    ),
    "idefics3": Projector(
        "llama",
        "Idefics3ForConditionalGeneration",
        "idefics3",
        "llama",
        _idefics3,
        _idefics3_processor,
        _siglip_names("model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"}),
        {"image_token_id": "<image>"},
        activation="gelu",
    ),
    "qwen2vl_merger": Projector(
        "qwen2vl",
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        "qwen2_vl_text",
        _qwen2,
        _qwen_processor,
        _qwen_names({"up": "fc1", "down": "fc2"}),
        _QWEN_TOKENS,
    ),
    "qwen2.5vl_merger": Projector(
        "qwen2vl",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        _qwen2_5,
        _qwen_processor,
        _qwen_names({"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}),
        _QWEN_TOKENS,
        activation="silu",
    ),
}


@dataclass(frozen=True)
class WholeModel:
    """A text decoder with the tower of an mmproj file, as files of a folder.

    Attributes:
        config: config.json.
        processor: the processor's files, by their names.
        tokenizer: entries of tokenizer_config.json beside the decoder's.
        weights: the tower's and the projector's.
    """

    config: Config
    processor: dict[str, Config]
    tokenizer: Config
    weights: list[Weight]


def whole_model(file: GGUFFile, decoder: GGUFFile, text: Config) -> WholeModel:
    """
    Args:
        file: the mmproj file.
        decoder: the text decoder's.
        text: its config.json.

    Raises:
        ValueError: the projector is not known, or not the decoder's, or an entry or a tensor of the file is wrong.
    """
    header = ClipHeader(file)
    kind = header.get("projector_type")
    if not isinstance(kind, str) or (row := PROJECTORS.get(kind)) is None:
        raise header.error(f"clip.projector_type must be one of {', '.join(PROJECTORS)}, got {shown(kind)}")
    if (found := decoder.metadata.get("general.architecture")) != row.decoder:
        raise header.error(f"the tower is one of {row.decoder}, and {decoder.path.name} is {found}")
    if (width := header.size("projection_dim")) != text["hidden_size"]:
        raise header.error(f"the tower makes rows of {width}, and {decoder.path.name} takes {text['hidden_size']}")
    for name in ("gelu", "silu"):
        if header.get(f"use_{name}", False) and name != row.activation:
            raise header.error(f"clip.use_{name} is not the activation of {kind}")
    whole = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "text_config": _text_config(header, row, decoder, text),
        **row.config(header),
        **{name: _token_id(header, decoder, token) for name, token in row.tokens.items()},
    }
    of_whole = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
    whole |= {name: text[name] for name in of_whole if name in text}
    files = row.processor(header)
    header.check_unread()
    tokenizer = {"extra_special_tokens": dict(row.tokenizer)} if row.tokenizer else {}
    return WholeModel(whole, files, tokenizer, list(_weights(header, row)))


def _text_config(h: ClipHeader, row: Projector, decoder: GGUFFile, text: Config) -> Config:
    own = {name: value for name, value in text.items() if name not in ("architectures", "quantization_config")}
    own["model_type"] = row.text_type
    if row.decoder == "qwen2vl":
        sections = decoder.metadata.get(f"{row.decoder}.rope.dimension_sections")
        if not isinstance(sections, list) or len(sections) < 3:
            raise h.error(f"{decoder.path.name} has no {row.decoder}.rope.dimension_sections")
        own["rope_parameters"] = own["rope_parameters"] | {"mrope_section": sections[:3]}
    return own


def _token_id(h: ClipHeader, decoder: GGUFFile, token: str) -> int:
    tokens = decoder.metadata.get("tokenizer.ggml.tokens") or []
    if token not in tokens:
        raise h.error(f"{decoder.path.name} has no token {token}, which stands beside pictures")
    return int(tokens.index(token))


def _weights(h: ClipHeader, row: Projector) -> Iterator[Weight]:
    swaps = _has_old_names(h)
    for tensor, entry in h.file.tensors.items():
        if row.decoder == "qwen2vl" and (tensor == _SECOND or ".attn_k." in tensor or ".attn_v." in tensor):
            continue  # parts of others
        part, _, ending = tensor.rpartition(".")
        layer = part.split(".")[2] if part.startswith("v.blk.") else ""
        part = part.replace(f".{layer}.", ".{}.", 1) if layer else part
        if swaps and part.endswith(("ffn_up", "ffn_down")):
            part = part.replace("up", "?").replace("down", "up").replace("?", "down")
        name = row.names.get(part)
        if name is None or ending not in ("weight", "bias"):
            raise h.error(f"a tower of this projector has no tensor {tensor}")
        name = name.format(layer)
        yield _weight(h, row, Weight(name if name.endswith("_weight") else f"{name}.{ending}", entry.shape, tensor))


def _weight(h: ClipHeader, row: Projector, weight: Weight) -> Weight:
    """The checkpoint's, of which the converter made one or several tensors."""
    if weight.tensor == "mm.soft_emb_norm.weight":
        return Weight(weight.name, weight.shape, weight.tensor, change=lambda value: value - 1)
    if row.decoder != "qwen2vl":
        return weight
    if weight.tensor == "v.patch_embd.weight":
        rows, *rest = h.shape(weight.tensor, 4)
        h.shape(_SECOND, 4)
        shape = (rows, rest[0], 2, *rest[1:])

        def stacked(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return value.reshape(2, *weight.shape).transpose(1, 2, 0, 3, 4)

        return Weight(weight.name, shape, weight.tensor, change=stacked, keeps_rows=False, others=(_SECOND,))
    if ".attn_q." in weight.tensor:
        others = tuple(weight.tensor.replace("attn_q", f"attn_{each}") for each in "kv")
        rows = weight.shape[0] + sum(h.shape(other)[0] for other in others)
        return Weight(weight.name, (rows, *weight.shape[1:]), weight.tensor, others=others)
    return weight


def _has_old_names(h: ClipHeader) -> bool:
    """Whether the file calls the MLP's layers by each other's names, as llama.cpp's first converters did."""
    width, (rows, columns) = h.size("embedding_length"), h.shape("v.blk.0.ffn_up.weight", 2)
    return rows == width != columns

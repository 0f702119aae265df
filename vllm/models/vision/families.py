"""The whole models of which a text decoder is a part, as far as pictures need to know them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm.config.checkpoint.auto_config import load_auto_config
from vllm.config.checkpoint.config import HFConfig
from vllm.config.checkpoint.text_part import MARK, RETRIEVERS, WHOLE

# Sections of a head's frequencies that turn by time, height and width, where config.json says none.
_SECTIONS = {
    "glm4v_moe_text": (8, 12, 12),
    "glm4v_text": (8, 12, 12),
    "glm_ocr_text": (8, 12, 12),
    "paddleocr_vl_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen2_vl_text": (16, 24, 24),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_5_moe_text": (11, 11, 10),
    "qwen3_5_text": (11, 11, 10),
}
# These alternate between the three, the others have a run of each.
_ALTERNATING = ("qwen3_",)


class Whole(NamedTuple):
    """The tokens that see each other: each run of a picture's rows, or the prompt with a picture."""

    kind: Literal["pictures", "prompt"]
    in_windows_only: bool = False  # in layers without a window they do not
    beyond_windows: bool = False  # in layers with a window also those before it


# Arguments of transformers' forward pass that ask nothing of a decoder beyond the rows and the positions.
_USUAL = frozenset(
    (
        "self input_ids attention_mask position_ids cache past_key_values inputs_embeds mm_encoder_outputs labels "
        "use_cache vision_feature_select_strategy image_hidden_states kwargs pixel_values_videos video_grid_thw "
        "image_sizes_videos vision_aspect_ratio batch_num_images cache_position logits_to_keep output_attentions "
        "output_hidden_states return_dict rope_deltas second_per_grid_ts lm_kwargs target_sizes_videos "
        "video_compression_mask video_merge_sizes"
    ).split()
)


# Models whose towers take the patches of several pictures in a row and let each see its own alone, by model_type: that
# no bit of a picture depends on others is tested.
_JOINING = frozenset(
    (
        "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe exaone4_5 glm4v glm4v_moe glm46v glm_ocr "
        "hyperclovax_vision_v2 lfm3_vl"
    ).split()
)
# Models whose videos were compared, by model_type.
_WITH_VIDEOS = frozenset(
    (
        "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe smolvlm internvl llava_onevision "
        "glm4v glm4v_moe glm46v"
    ).split()
)
# Models whose forward pass takes more, which is done here or is of other media: the tests compare them.
_COMPARED = frozenset({"gemma3n", "granite4_vision", "gemma4", "gemma4_unified", "ovis2"})


@dataclass(frozen=True)
class PictureFamily:
    """A model that reads pictures.

    Attributes:
        config: transformers' of the whole.
        base: transformers' class that has the tower, without a head.
        row_id: the token that stands for a row of the tower.
        is_retriever: whether it is a part of one that embeds each token (ColPali, ColQwen2), which gives the decoder
            neither the kinds nor the axes of tokens.
    """

    config: Any
    base: type[Any]
    row_id: int
    is_retriever: bool = False

    @property
    def name(self) -> str:
        """The class' name, for errors."""
        return self.base.__name__

    @property
    def whole_blocks(self) -> Whole | None:
        """Which tokens see those after them, too."""
        return None if self.is_retriever else whole_blocks(self.config.to_dict())

    @property
    def has_axes(self) -> bool:
        """Whether tokens have positions in time, height and width."""
        return hasattr(self.base, "get_rope_index") and not self.is_retriever

    @property
    def marker_ids(self) -> tuple[int, ...]:
        """Tokens around and between rows that have rows of their own: the tower's `visual_indicator_features`."""
        return tuple(getattr(self.config, "visual_indicator_token_ids", None) or ())

    @property
    def row_ids(self) -> tuple[int, ...]:
        """The tokens that stand for rows, in the order of `marker_ids` after the first."""
        return (self.row_id, *self.marker_ids)

    @property
    def joins_pictures(self) -> bool:
        """Whether a run of the tower may have several pictures without a change of any."""
        return self.config.model_type in _JOINING

    @property
    def reads_videos(self) -> bool:
        """Whether its processor makes videos of frames, and its tower reads these."""
        return self.config.model_type in _WITH_VIDEOS and not self.is_retriever

    @property
    def has_video_tower(self) -> bool:
        """Whether videos are given to `get_video_features`; otherwise their frames are pictures."""
        return hasattr(self.base, "get_video_features")

    @property
    def video_arguments(self) -> tuple[str, ...]:
        """The tower's arguments of a video."""
        return tuple(inspect.signature(self.base.get_video_features).parameters) if self.has_video_tower else ()

    @property
    def all_row_ids(self) -> tuple[int, ...]:
        """`row_ids`, and the token of a video's rows where there is one."""
        video_id = getattr(self.config, "video_token_id", None) if self.reads_videos else None
        return (*self.row_ids, video_id) if isinstance(video_id, int) else self.row_ids

    @property
    def filler_id(self) -> int | None:
        """The token whose further inputs to layers are those of a row; None: layers take nothing further."""
        text = self.config.get_text_config()
        return text.pad_token_id if getattr(text, "hidden_size_per_layer_input", None) else None

    @property
    def parts_of_a_row(self) -> int:
        """How many embeddings a row of the tower is: its token's, and those that are added before some layers."""
        return 1 + len(self.added_before)

    @property
    def added_before(self) -> tuple[int, ...]:
        """The layers before which something of a row is added."""
        if self.config.model_type == "granite4_vision":
            spatial = self.config.spatial_target_layers
            return tuple(sorted({*spatial, *(layer for _, layer in self.config.deepstack_layer_map)}))
        tower = getattr(self.config, "vision_config", None)
        return tuple(range(1, 1 + len(getattr(tower, "deepstack_visual_indexes", None) or ())))


def whole_blocks(raw: Mapping[str, Any]) -> Whole | None:
    """Which tokens see those after them, by the whole model's config.json."""
    kind, text = raw.get("model_type"), raw.get("text_config") or {}
    if kind == "gemma3":
        return Whole("pictures")
    if kind == "paligemma":
        return Whole("prompt", beyond_windows=text.get("model_type") == "gemma2")
    if kind in ("gemma4", "gemma4_unified") and text.get("use_bidirectional_attention") == "vision":
        return Whole("pictures", in_windows_only=True)
    return None


def picture_family(config: HFConfig, folder: Path) -> PictureFamily:
    """The whole model of a text decoder.

    Raises:
        ValueError: transformers' model of it has not the interface that its image-text models share.
    """
    import transformers

    auto = load_auto_config(config.raw[WHOLE], folder, False)
    base: Any = transformers.MODEL_MAPPING.get(type(auto), None)
    architecture = config.raw[MARK]
    refusal = f"{architecture} reads no pictures here: %s; pass language_model_only=True to run its text decoder alone"
    if base is None or not hasattr(base, "get_image_features"):
        raise ValueError(refusal % "transformers' model of it has no get_image_features")
    row_id = getattr(auto, "image_token_id", None)
    if not isinstance(row_id, int):
        raise ValueError(refusal % "its config.json names no image_token_id")
    family = PictureFamily(auto, base, row_id, architecture in RETRIEVERS)
    if more := _more_than_rows(family):
        raise ValueError(refusal % more)
    if family.has_axes and auto.get_text_config().model_type not in _SECTIONS:
        raise ValueError(refusal % "the positions that its pictures have are not known")
    return family


def frequency_axes(family: PictureFamily, count: int) -> list[int]:
    """The axis (time, height, width: 0 to 2) by which each of `count` frequencies of a head turns.

    Raises:
        ValueError: config.json has other sections than a head can have.
    """
    text = family.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    given = rope.get("mrope_section")
    alternates = text.model_type.startswith(_ALTERNATING)
    if given is not None:
        is_three = isinstance(given, Sequence) and [type(each) for each in given] == [int] * 3 and min(given) >= 0
        if not is_three or (sum(given) != count and not alternates):
            raise ValueError(f"mrope_section must be three sizes that add up to {count}, got {given!r}")
    sections = list(given or _SECTIONS[text.model_type])
    if not alternates:
        return [axis % 3 for axis, length in enumerate(sections) for _ in range(length)][:count]
    axes = [0] * count
    for axis in (1, 2):
        for index in range(axis, min(3 * sections[axis], count), 3):
            axes[index] = axis
    return axes


def _more_than_rows(family: PictureFamily) -> str:
    """How transformers' model does more with pictures than put rows in their tokens' places, as far as its code tells;
    empty: it does not, or it is done here."""
    if family.config.model_type in _COMPARED:
        return ""
    forward = inspect.unwrap(family.base.forward)
    known = set(_USUAL) | set(inspect.signature(family.base.get_image_features).parameters)
    if family.has_axes or family.is_retriever:
        known.add("mm_token_type_ids")
    if family.whole_blocks is not None or family.is_retriever:
        known.add("token_type_ids")
    if others := sorted(set(inspect.signature(forward).parameters) - known):
        return f"transformers' model of it takes {', '.join(others)}, too"
    source = inspect.getsource(forward)
    if ("masked_scatter" not in source and "inputs_merger" not in source) or "inputs_embeds[" in source:
        return "transformers' model of it puts pictures into a prompt in a way of its own"
    return ""

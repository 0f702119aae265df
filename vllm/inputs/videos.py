"""A prompt's videos: frames in memory, and when they were seen."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown

_FIELDS = ("total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices")
_SAMPLED = "do_sample_frames"


@dataclass(frozen=True, eq=False)
class GivenVideo:
    """A video as a prompt came with it.

    Attributes:
        frames: PIL images, or arrays or tensors as those of pictures; also one array or tensor with T before these
            dimensions.
        metadata: the video that the frames are of: `total_num_frames`, `fps` (frames a second), `duration` (seconds),
            `frames_indices` (which frames these are), and `do_sample_frames` (False: take them all).
    """

    frames: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Video:
    """A video that was checked.

    Attributes:
        frames: uint8 [T, H, W, 3].
        metadata: transformers' VideoMetadata as a dict.
        options: of the processor, which the metadata ask for.
    """

    frames: np.ndarray
    metadata: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, frames: np.ndarray, metadata: Mapping[str, Any]) -> Video:
        """`frames` with what `metadata` say of them; `name` is the prompt's field, in errors.

        Raises:
            VLLMValidationError: it says something unknown, or something of other frames.
        """
        unknown = sorted(str(key) for key in metadata if key not in (*_FIELDS, _SAMPLED))
        if unknown:
            known = ", ".join((*_FIELDS, _SAMPLED))
            raise VLLMValidationError(f"{name}: metadata of a video have no {unknown[0]!r}; known: {known}", name)
        count = len(frames)
        found = {key: metadata[key] for key in _FIELDS if metadata.get(key) is not None}
        for key in {"fps", "duration"} & found.keys():
            value = found[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise VLLMValidationError(f"{name}: {key} must be a number above 0, got {shown(value)}", name)
        sampled = metadata.get(_SAMPLED)
        indices = found.get("frames_indices")
        if indices is not None:
            try:
                indices = [operator.index(index) for index in indices]
            except TypeError:
                message = f"{name}: frames_indices must be the numbers of the frames, got {shown(indices)}"
                raise VLLMValidationError(message, name) from None
            if len(indices) != count:
                message = f"{name}: frames_indices has {len(indices)} numbers for {count} frames"
                raise VLLMValidationError(message, name, len(indices))
            # They have been chosen already.
            sampled = False if sampled is None else sampled
        found["frames_indices"] = list(range(count)) if indices is None else indices
        found.setdefault("total_num_frames", count)
        if sampled is not False and found["total_num_frames"] != count:
            message = (
                f"{name}: there are {count} of the video's {found['total_num_frames']} frames, of which none can "
                f"be chosen: pass all, or {_SAMPLED}=False with frames_indices"
            )
            raise VLLMValidationError(message, name, count)
        found |= {"height": frames.shape[1], "width": frames.shape[2]}
        return cls(frames, found, {} if sampled is None else {_SAMPLED: bool(sampled)})


def as_videos(value: Any) -> tuple[Any, ...]:
    """The videos under a prompt's "video": one, or a list of them; see `GivenVideo`."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return (GivenVideo(*value),)
    dims = getattr(value, "ndim", 0)
    if dims == 5:
        return tuple(GivenVideo(each) for each in value)
    if isinstance(value, (list, tuple)) and value and not _is_frame(value[0]):
        return tuple(found for each in value for found in ((None,) if each is None else as_videos(each)))
    return (value if hasattr(value, "place") or isinstance(value, GivenVideo) else GivenVideo(value),)


def _is_frame(value: Any) -> bool:
    """Whether it has two or three dimensions, or is a PIL image."""
    return getattr(value, "ndim", 0) in (2, 3) or hasattr(value, "getbands")

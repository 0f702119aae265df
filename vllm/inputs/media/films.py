"""Files of videos to frames: a bounded number of them, and no larger ones than are asked for."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError
from vllm.inputs.media.decoding import MAX_PIXELS
from vllm.inputs.videos import GivenVideo

CHOSEN_FRAMES = 32
"""How many frames of a film are read, evenly spaced: upstream's default."""

_MAX_FRAMES = 2**16
_MAX_DECODED_PIXELS = 2**34  # of all frames up to the last that is chosen: four and a half minutes of 1920 x 1080
_MAX_SECONDS = 30.0
# Others of FFmpeg's are code that few have looked at; its other formats may name further files to read.
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")


def film(name: str, data: bytes, reserve: Callable[[int], None] | None = None) -> GivenVideo:
    """Frames of an MP4 or WebM file, uint8 [T, H, W, 3]: `CHOSEN_FRAMES` from the first to the last, evenly spaced, or
    all of fewer. They are those of transformers' PyAV reader at the same numbers.

    Args:
        name: the request's field, in errors.
        reserve: is told the number of pixels before they are made; it may raise.

    Raises:
        VLLMValidationError: another format or codec, a damaged file, more frames or pixels than are read, or PyAV is
            missing.
    """
    try:
        import av
    except ImportError:
        message = f"{name}: reading films needs PyAV (pip install 'vllm[vision]'); frames can be sent without it"
        raise VLLMValidationError(message, name) from None
    kind = _demuxer(data)
    if kind is None:
        raise VLLMValidationError(f"{name} is no film in MP4 or WebM that can be read", name)
    try:
        with av.open(io.BytesIO(data), format=kind) as container:
            count = _num_frames(name, container)
        # A second reader, as those that were read to the end cannot all begin anew.
        with av.open(io.BytesIO(data), format=kind) as container:
            return _read(name, container, count, reserve)
    except (VLLMValidationError, MemoryError):
        raise
    except av.FFmpegError:
        raise VLLMValidationError(f"{name} is a damaged or truncated film", name) from None


def _demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the format that the first bytes say."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def _num_frames(name: str, container: Any) -> int:
    """By the packets, as headers may say anything."""
    stream = _stream(name, container)
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > _MAX_FRAMES:
            raise VLLMValidationError(f"{name} has more than {_MAX_FRAMES} frames", name)
    if not count:
        raise VLLMValidationError(f"{name} is a film without frames", name)
    return count


def _stream(name: str, container: Any) -> Any:
    if not container.streams.video:
        raise VLLMValidationError(f"{name} is a file without a film", name)
    stream = container.streams.video[0]
    codec = None if stream.codec_context is None else stream.codec_context.codec.canonical_name
    if codec not in _CODECS:
        raise VLLMValidationError(f"{name} is a film of another codec than {', '.join(_CODECS)}", name)
    return stream


def _read(name: str, container: Any, count: int, reserve: Callable[[int], None] | None) -> GivenVideo:
    stream = _stream(name, container)
    context = stream.codec_context
    size = context.width * context.height
    if not 0 < size <= MAX_PIXELS:
        message = f"{name} has frames of {context.width} x {context.height} pixels; one has 1 to {MAX_PIXELS}"
        raise VLLMValidationError(message, name)
    if size * count > _MAX_DECODED_PIXELS:
        message = f"{name} has {count} frames of {size} pixels, more than {_MAX_DECODED_PIXELS} pixels together"
        raise VLLMValidationError(message, name)
    numbers = np.unique(np.linspace(0, count - 1, min(CHOSEN_FRAMES, count)).astype(int)).tolist()
    if reserve is not None:
        reserve(size * len(numbers))
    context.options = {"max_pixels": str(MAX_PIXELS)}
    context.thread_count = 1
    frames = _frames(name, container, stream, set(numbers), (context.height, context.width))
    # A file's last packets may hold no frame of their own.
    numbers = numbers[: len(frames)]
    said: dict[str, Any] = {"total_num_frames": count, "frames_indices": numbers, "video_backend": "pyav"}
    rate = float(stream.average_rate or 0)
    if rate > 0:
        said |= {"fps": rate, "duration": count / rate}
    return GivenVideo(np.stack(frames), {**said, "do_sample_frames": False})


def _frames(name: str, container: Any, stream: Any, numbers: set[int], shape: tuple[int, int]) -> list[np.ndarray]:
    """The frames of these numbers, uint8 [H, W, 3] each."""
    ends = time.monotonic() + _MAX_SECONDS
    frames: list[np.ndarray] = []
    for number, frame in enumerate(container.decode(stream)):
        if time.monotonic() > ends:
            raise VLLMValidationError(f"{name} takes more than {_MAX_SECONDS:g} s to decode: send frames of it", name)
        if number in numbers:
            if (frame.height, frame.width) != shape:
                raise VLLMValidationError(f"{name} is a film whose frames have several sizes", name)
            frames.append(frame.to_ndarray(format="rgb24"))
        if len(frames) == len(numbers):
            break
    if not frames:
        raise VLLMValidationError(f"{name} is a damaged or truncated film", name)
    return frames

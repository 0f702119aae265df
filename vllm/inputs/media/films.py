"""Files of videos to frames: a bounded number of them, and no larger ones than are asked for."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.media.decoding import MAX_PIXELS
from vllm.inputs.media.sources import MAX_FRAMES
from vllm.inputs.videos import GivenVideo

_MAX_FRAMES = 2**16
_MAX_DECODED_PIXELS = 2**34  # of all frames up to the last that is chosen: four and a half minutes of 1920 x 1080
MAX_SECONDS = 30.0
"""Seconds that a film may take to decode."""
# Others of FFmpeg's are code that few have looked at; its other formats may name further files to read.
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
# FFmpeg decodes the first frames of all tracks as it opens a file.
_OPENED = {"codec_whitelist": ",".join((*_CODECS, "libdav1d")), "max_pixels": str(MAX_PIXELS)}


@dataclass(frozen=True)
class FilmFrames:
    """
    Attributes:
        count: the most frames of a film that are read, evenly spaced from the first to the last; upstream's default.
        rate: the most of a second; None: as many as `count` says.
    """

    count: int = 32
    rate: float | None = None

    @classmethod
    def of(cls, given: Any) -> FilmFrames:
        """media_io_kwargs, {"video": {"num_frames": N, "fps": F}}; upstream's -1 is as many as there may be.

        Raises:
            ValueError: it has other fields, or they are no such numbers.
        """
        name = "media_io_kwargs"
        if not isinstance(given, dict | None):
            raise ValueError(f'{name} must be a dict such as {{"video": {{"num_frames": 32}}}}, got {shown(given)}')
        fields = (given or {}).get("video") or {}
        others = [kind for kind, value in (given or {}).items() if kind != "video" and value]
        if others or not isinstance(fields, dict) or (others := [*(fields.keys() - {"num_frames", "fps"})]):
            wrong = shown(others[0] if others else fields)
            raise ValueError(f"{name} has num_frames and fps of video, not {wrong}: others are read as they are")
        count, rate = fields.get("num_frames"), fields.get("fps")
        count = cls.count if count is None else MAX_FRAMES if count == -1 else count
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_FRAMES:
            raise ValueError(f"{name}: num_frames must be a number from 1 to {MAX_FRAMES}, or -1, got {shown(count)}")
        rate = None if rate in (-1, None) else rate
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf
        ):
            raise ValueError(f"{name}: fps must be a number above 0, or -1, got {shown(rate)}")
        return cls(count, rate)

    def numbers(self, total: int, rate: float) -> list[int]:
        """Which of a film's `total` frames, `rate` a second (0: unknown), are read."""
        count = min(self.count, total)
        if self.rate is not None and rate > 0:
            count = min(count, max(1, int(total / rate * self.rate)))
        found: list[int] = np.linspace(0, total - 1, count).astype(int).tolist()
        return found


def film(
    name: str, data: bytes, reserve: Callable[[int], None] | None = None, chosen: FilmFrames = FilmFrames()
) -> GivenVideo:
    """Frames of an MP4 or WebM file, uint8 [T, H, W, 3], to the bit those of transformers' PyAV reader at the same
    numbers.

    Args:
        name: the request's field, in errors.
        reserve: is told the number of pixels before they are made; it may raise.
        chosen: which frames.

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

    def opened() -> Any:
        return av.open(io.BytesIO(data), format=kind, options=_OPENED, metadata_errors="replace")

    try:
        with opened() as container:
            count = _num_frames(name, container)
        # A second reader, as those that were read to the end cannot all begin anew.
        with opened() as container:
            return _read(name, container, count, reserve, chosen)
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


def _read(
    name: str, container: Any, count: int, reserve: Callable[[int], None] | None, chosen: FilmFrames
) -> GivenVideo:
    stream = _stream(name, container)
    context = stream.codec_context
    size = context.width * context.height
    if not 0 < size <= MAX_PIXELS:
        message = f"{name} has frames of {context.width} x {context.height} pixels; one has 1 to {MAX_PIXELS}"
        raise VLLMValidationError(message, name)
    if size * count > _MAX_DECODED_PIXELS:
        message = f"{name} has {count} frames of {size} pixels, more than {_MAX_DECODED_PIXELS} pixels together"
        raise VLLMValidationError(message, name)
    rate = float(stream.average_rate or 0)
    numbers = chosen.numbers(count, rate)
    if reserve is not None:
        reserve(size * len(numbers))
    context.options = {"max_pixels": _OPENED["max_pixels"]}
    context.thread_count = 1
    frames = _frames(name, container, stream, set(numbers), (context.height, context.width))
    # A file's last packets may hold no frame of their own.
    numbers = numbers[: len(frames)]
    said: dict[str, Any] = {"total_num_frames": count, "frames_indices": numbers, "video_backend": "pyav"}
    if rate > 0:
        said |= {"fps": rate, "duration": count / rate}
    return GivenVideo(np.stack(frames), {**said, "do_sample_frames": False})


def _frames(name: str, container: Any, stream: Any, numbers: set[int], shape: tuple[int, int]) -> list[np.ndarray]:
    """The frames of these numbers, uint8 [H, W, 3] each."""
    ends = time.monotonic() + MAX_SECONDS
    frames: list[np.ndarray] = []
    for number, frame in enumerate(container.decode(stream)):
        if time.monotonic() > ends:
            raise VLLMValidationError(f"{name} takes more than {MAX_SECONDS:g} s to decode: send frames of it", name)
        if number in numbers:
            if (frame.height, frame.width) != shape:
                raise VLLMValidationError(f"{name} is a film whose frames have several sizes", name)
            frames.append(frame.to_ndarray(format="rgb24"))
        if len(frames) == len(numbers):
            break
    if not frames:
        raise VLLMValidationError(f"{name} is a damaged or truncated film", name)
    return frames

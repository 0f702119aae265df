"""Media as texts. Encoding works, for clients of other servers; nothing here fetches or decodes."""

from __future__ import annotations

import base64
import io
from typing import Any

from vllm.multimodal.registry import refuse_media


def encode_image_base64(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """A PIL image as a base64 text of its file."""
    buffer = io.BytesIO()
    (image if image_mode is None else image.convert(image_mode)).save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def encode_image_url(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The same as a data URL."""
    encoded = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{format.lower()};base64,{encoded}"


def fetch_image(image_url: str, image_io_kwargs: dict[str, Any] | None = None) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("fetch_image")


def fetch_audio(audio_url: str, audio_io_kwargs: dict[str, Any] | None = None) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("fetch_audio")


def fetch_video(video_url: str, video_io_kwargs: dict[str, Any] | None = None) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("fetch_video")


def encode_audio_url(*args: Any, **kwargs: Any) -> str:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("encode_audio_url")


def encode_video_url(*args: Any, **kwargs: Any) -> str:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("encode_video_url")

"""Files of pictures to pixels, which are counted before they are made."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read. Others that Pillow knows run larger libraries, other programs, or files within files."""

MAX_PIXELS = 2**26
"""The most pixels of a picture: 8192 x 8192."""


def decoded(name: str, data: bytes, reserve: Callable[[int], None] | None = None) -> Image:
    """The picture in a file as RGB, upright, as transformers' `load_image` has it; an animation's first frame.

    Args:
        name: the request's field, in errors.
        reserve: is told the number of pixels before they are made; it may raise.

    Raises:
        VLLMValidationError: another format, a damaged file, more than MAX_PIXELS, or Pillow is missing.
    """
    image_module, ops = _pillow(name)
    try:
        image = image_module.open(io.BytesIO(data), formats=FORMATS)
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
        raise VLLMValidationError(f"{name} has more than the limit of {MAX_PIXELS} pixels", name) from None
    except Exception:  # a damaged header fails in many ways
        raise VLLMValidationError(f"{name} is no picture in {_list(FORMATS)} that can be read", name) from None
    with image:
        check_size(name, image.width, image.height)
        if reserve is not None:
            reserve(image.width * image.height)
        try:
            return ops.exif_transpose(image).convert("RGB")
        except MemoryError:
            raise
        except Exception:  # a damaged file fails in many ways
            message = f"{name} is a damaged or truncated {image.format} picture"
            raise VLLMValidationError(message, name) from None


def check_size(name: str, width: int, height: int) -> None:
    """Raises VLLMValidationError unless there are pixels, and no more than MAX_PIXELS."""
    if not 0 < width * height <= MAX_PIXELS:
        message = f"{name} has {width} x {height} pixels; a picture has 1 to {MAX_PIXELS}"
        raise VLLMValidationError(message, name)


def _pillow(name: str) -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        message = f"{name}: reading pictures needs Pillow (pip install 'vllm[vision]')"
        raise VLLMValidationError(message, name) from None
    return Image, ImageOps


def _list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"

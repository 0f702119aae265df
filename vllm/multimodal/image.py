"""Images before they are sent anywhere."""

from __future__ import annotations

from typing import Any


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """A PIL image in another mode; from RGBA to RGB, on white."""
    if image.mode == "RGBA" and to_mode == "RGB":
        from PIL import Image

        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert(to_mode)

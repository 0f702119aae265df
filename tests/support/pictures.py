"""Pictures that tests draw, as files."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def drawn(width: int = 30, height: int = 20, seed: int = 0) -> Image.Image:
    """A gradient with a coloured square, so that no two sides are alike."""
    across = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    down = np.linspace(255, 0, height, dtype=np.uint8)[:, None, None]
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., :1], pixels[..., 1:2] = across, down
    pixels[: height // 2, : width // 3] = np.random.default_rng(seed).integers(0, 256, 3, dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes | Image.Image, kind: str = "image/png") -> str:
    data = file_of(data) if isinstance(data, Image.Image) else data
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_of_size(width: int, height: int) -> bytes:
    """A file of 200 kB that says it has so many pixels, one bit each."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", bytes(200_000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts

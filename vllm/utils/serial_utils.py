"""Tensors as bytes, in the types and byte orders that clients of embeddings ask for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]


@dataclass(frozen=True)
class DTypeInfo:
    """Encoding of a type's numbers."""

    torch_dtype: torch.dtype
    numpy_view_dtype: type[np.generic]  # an unsigned integer of the same width

    @property
    def nbytes(self) -> int:
        """Size of a number, in bytes."""
        return self.torch_dtype.itemsize


EMBED_DTYPES: dict[str, DTypeInfo] = {
    "float32": DTypeInfo(torch.float32, np.uint32),
    "float16": DTypeInfo(torch.float16, np.uint16),
    "bfloat16": DTypeInfo(torch.bfloat16, np.uint16),
    # The type of Open Compute's specification, which both accelerators' libraries name so.
    "fp8_e4m3": DTypeInfo(torch.float8_e4m3fn, np.uint8),
    "fp8_e5m2": DTypeInfo(torch.float8_e5m2, np.uint8),
}
ENDIANNESS: tuple[Endianness, ...] = ("native", "big", "little")


def tensor2binary(tensor: Tensor, embed_dtype: EmbedDType, endianness: Endianness) -> bytes:
    """The tensor's numbers in row-major order.

    Raises:
        ValueError: no such type or byte order.
    """
    info = encoding(embed_dtype, endianness)
    array = tensor.detach().cpu().to(info.torch_dtype).contiguous().view(torch.uint8).numpy().reshape(-1)
    return in_order(array.view(info.numpy_view_dtype), endianness).tobytes()


def encoding(embed_dtype: str, endianness: str) -> DTypeInfo:
    """Encoding of a type's numbers. ValueError: no such type or byte order."""
    if embed_dtype not in EMBED_DTYPES:
        raise ValueError(f"embed_dtype must be one of {', '.join(EMBED_DTYPES)}, got {embed_dtype!r}")
    if endianness not in ENDIANNESS:
        raise ValueError(f"endianness must be one of {', '.join(ENDIANNESS)}, got {endianness!r}")
    return EMBED_DTYPES[embed_dtype]


def in_order(array: np.ndarray, endianness: str) -> np.ndarray:
    """Between this machine's byte order and another one."""
    return array if endianness in ("native", sys.byteorder) else array.byteswap()

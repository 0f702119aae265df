"""Pooled tensors as bytes, as a server puts an answer together."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.utils.serial_utils import EMBED_DTYPES, EmbedDType, Endianness, tensor2binary


@dataclass
class MetadataItem:
    """Where one output lies in the body: bytes `start` to `end`."""

    index: int
    embed_dtype: EmbedDType
    endianness: Endianness
    start: int
    end: int
    shape: tuple[int, ...]


def encode_pooling_bytes(
    tensors: Sequence[Tensor], embed_dtype: EmbedDType = "float32", endianness: Endianness = "native"
) -> tuple[bytes, list[MetadataItem]]:
    """The tensors' bytes, one after the other, and where each is. ValueError: no such type or byte order."""
    body = b"".join(tensor2binary(tensor, embed_dtype, endianness) for tensor in tensors)
    return body, metadata_items([tuple(tensor.shape) for tensor in tensors], embed_dtype, endianness)


def encoded(tensor: Tensor, form: str | None, embed_dtype: EmbedDType, endianness: Endianness) -> Any:
    """A tensor as JSON holds it: nested lists of float32, or ("base64") its bytes."""
    if form != "base64":
        return tensor.float().tolist()
    return base64.b64encode(tensor2binary(tensor, embed_dtype, endianness)).decode("ascii")


def metadata_items(
    shapes: Sequence[tuple[int, ...]], embed_dtype: EmbedDType, endianness: Endianness
) -> list[MetadataItem]:
    """Metadata of outputs of these shapes, one after the other."""
    items, start = [], 0
    for index, shape in enumerate(shapes):
        end = start + EMBED_DTYPES[embed_dtype].nbytes * math.prod(shape)
        items.append(MetadataItem(index, embed_dtype, endianness, start, end, shape))
        start = end
    return items

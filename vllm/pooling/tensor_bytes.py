"""Pooled tensors as bytes: how a server puts an answer together, and a client takes it apart."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.utils.serial_utils import EMBED_DTYPES, EmbedDType, Endianness, binary2tensor, tensor2binary


@dataclass
class MetadataItem:
    """Where one output lies in the body: bytes `start` to `end`."""

    index: int
    embed_dtype: EmbedDType
    endianness: Endianness
    start: int
    end: int
    shape: tuple[int, ...]


def build_metadata_items(
    embed_dtype: EmbedDType, endianness: Endianness, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """Metadata of `n_request` outputs of one shape, one after the other."""
    return _metadata([shape] * n_request, embed_dtype, endianness)


def encode_pooling_bytes(
    tensors: Sequence[Tensor], embed_dtype: EmbedDType = "float32", endianness: Endianness = "native"
) -> tuple[bytes, list[MetadataItem]]:
    """The tensors' bytes, one after the other, and where each is. ValueError: no such type or byte order."""
    body = b"".join(tensor2binary(tensor, embed_dtype, endianness) for tensor in tensors)
    return body, _metadata([tuple(tensor.shape) for tensor in tensors], embed_dtype, endianness)


def decode_pooling_output(items: list[MetadataItem], body: bytes) -> list[Tensor]:
    """The outputs, in their own types and the order of their indices."""
    return [
        binary2tensor(body[item.start : item.end], tuple(item.shape), item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def encoded(tensor: Tensor, form: str | None, embed_dtype: EmbedDType, endianness: Endianness) -> Any:
    """A tensor as JSON holds it: nested lists of float32, or ("base64") its bytes."""
    if form != "base64":
        return tensor.float().tolist()
    return base64.b64encode(tensor2binary(tensor, embed_dtype, endianness)).decode("ascii")


def _metadata(shapes: Sequence[tuple[int, ...]], embed_dtype: EmbedDType, endianness: Endianness) -> list[MetadataItem]:
    items, start = [], 0
    for index, shape in enumerate(shapes):
        end = start + EMBED_DTYPES[embed_dtype].nbytes * math.prod(shape)
        items.append(MetadataItem(index, embed_dtype, endianness, start, end, shape))
        start = end
    return items

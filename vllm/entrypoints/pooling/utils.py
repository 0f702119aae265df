"""Embeddings as bytes: how a client takes an answer apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from vllm.utils.serial_utils import EMBED_DTYPES, EmbedDType, Endianness, binary2tensor


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
    """Of `n_request` outputs of one shape, one after the other."""
    size = EMBED_DTYPES[embed_dtype].nbytes * math.prod(shape)
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, shape)
        for index in range(n_request)
    ]


def decode_pooling_output(items: list[MetadataItem], body: bytes) -> list[Tensor]:
    """The outputs, in their own types and the order of their indices."""
    return [
        binary2tensor(body[item.start : item.end], tuple(item.shape), item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]

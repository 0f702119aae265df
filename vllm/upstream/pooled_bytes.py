"""How a client takes the server's bytes of pooled tensors apart."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from torch import Tensor

from vllm.pooling.tensor_bytes import MetadataItem, metadata_items
from vllm.utils.serial_utils import EmbedDType, Endianness, encoding, in_order


def build_metadata_items(
    embed_dtype: EmbedDType, endianness: Endianness, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """Metadata of `n_request` outputs of one shape, one after the other."""
    return metadata_items([shape] * n_request, embed_dtype, endianness)


def decode_pooling_output(items: list[MetadataItem], body: bytes) -> list[Tensor]:
    """The outputs, in their own types and the order of their indices."""
    return [
        binary2tensor(body[item.start : item.end], tuple(item.shape), item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def binary2tensor(binary: bytes, shape: tuple[int, ...], embed_dtype: EmbedDType, endianness: Endianness) -> Tensor:
    """The inverse of tensor2binary, in `embed_dtype`; -1 in `shape` is what the others leave.

    Raises:
        ValueError: no such type or byte order.
    """
    info = encoding(embed_dtype, endianness)
    array = in_order(np.frombuffer(binary, info.numpy_view_dtype), endianness)
    return torch.from_numpy(array.view(np.uint8).copy()).view(info.torch_dtype).reshape(shape)


def tensor2base64(x: Tensor) -> str:
    """A file of torch.save as base64."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")

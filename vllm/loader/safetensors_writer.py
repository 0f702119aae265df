"""Writing a safetensors file tensor by tensor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


class SafetensorsWriter:
    """Writes one file whose tensors come one at a time, in the order of `tensors`: by name, their shapes and dtypes
    (float32, bfloat16, float16 or uint8)."""

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._remaining = list(tensors.values())[::-1]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the data that follows
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        shape, dtype = self._remaining.pop()
        assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._file.close()
        assert error is not None or not self._remaining

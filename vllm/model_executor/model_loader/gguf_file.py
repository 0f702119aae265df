"""Reads a GGUF file's header in one pass, and tensors when they are requested."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# GGUF's value types; 8 is a string and 9 an array.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor is in the file."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch
    ggml_type: int  # GGML's number of the quantisation
    start: int  # first byte
    num_bytes: int


class GGUFFile:
    """A GGUF file: `metadata` holds the header's key-value pairs, `tensors` the tensors by name, in file order.
    ValueError if it is not GGUF, has an unknown version, byte order or quantisation, or is cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
        cursor = _Cursor(self._data.data, path.name)
        if cursor.take(4) != _MAGIC:
            raise ValueError(f"{path.name} is not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"{path.name}: GGUF version must be one of {_VERSIONS} (little-endian), got {version}")
        num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        self.tensors = self._read_tensor_table(cursor, num_tensors)

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32 of its shape."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        data = np.asarray(self._data[tensor.start : tensor.start + tensor.num_bytes])
        kind = GGMLQuantizationType(tensor.ggml_type)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = data.view("<f4" if kind is GGMLQuantizationType.F32 else "<f2")
        return dequantize(data.reshape(rows, -1), kind).reshape(tensor.shape)

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [rows, bytes of a row], mapped."""
        tensor = self.tensors[name]
        return self._data[tensor.start : tensor.start + tensor.num_bytes].reshape(math.prod(tensor.shape[:-1]), -1)

    def _read_tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = cursor.string()
            shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
            entries.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        base = -(-cursor.position // alignment) * alignment
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, ggml_type, offset in entries:
            if ggml_type not in sizes:
                known = ", ".join(kind.name for kind in GGMLQuantizationType)
                raise ValueError(f"{self.path.name}: tensor {name} has type {ggml_type}; known types: {known}")
            block, block_bytes = sizes[ggml_type]
            num_bytes = math.prod(shape) // block * block_bytes
            if base + offset + num_bytes > len(self._data):
                raise ValueError(f"{self.path.name} is cut short: tensor {name} ends beyond the end of the file")
            tensors[name] = GGUFTensor(name, shape, ggml_type, base + offset, num_bytes)
        return tensors


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"{self._name} is cut short: its header ends beyond the end of the file")
        taken = self._data[self.position : end]
        self.position = end
        return bytes(taken)

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        # Token texts may be cut inside a character; replaced characters do no harm in a header.
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                layout = np.dtype(_SCALARS[element]) if element != 7 else np.dtype(np.bool_)
                return np.frombuffer(self.take(count * layout.itemsize), dtype=layout).tolist()
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self._name}: GGUF value type {kind} is not known")
        return self.scalar(_SCALARS[kind])
